// Command outbox-relay publishes the events of a transactional outbox in PostgreSQL to RabbitMQ.
package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"os/signal"
	"runtime/debug"
	"slices"
	"syscall"
	"time"

	"outbox-relay/internal/migrate"
)

// Exit codes.
const (
	exitClean         = 0
	exitFailed        = 1 // a restart may help
	exitMisconfigured = 2 // a restart will not help
	exitOverrun       = 3 // SHUTDOWN_TIMEOUT passed before all was settled; what was unsettled is sent again
	exitFaults        = 4 // doctor found faults
	exitUnconfirmed   = 5 // nothing was done: many events would be touched, and --yes is missing
)

// shutdownGrace is how much longer than SHUTDOWN_TIMEOUT, which the relay itself keeps to, run
// waits before it gives up on the relay.
const shutdownGrace = 500 * time.Millisecond

func main() {
	os.Exit(run(context.Background(), os.Args[1:], os.Environ(), os.Stdout, os.Stderr))
}

// run does what the arguments say and returns the exit code. It ends when ctx is done, as it does
// on SIGINT or SIGTERM; a second signal ends the process at once.
func run(ctx context.Context, args, environ []string, stdout, stderr io.Writer) int {
	return runWith(ctx, args, environ, stdout, stderr, runRelay)
}

// relayFunc is the work itself, apart from what surrounds it. It ends soon after ctx is done.
type relayFunc func(ctx context.Context, cfg Config, log *slog.Logger, m *Metrics, h *Health) error

// runWith is run with another relay.
func runWith(ctx context.Context, args, environ []string, stdout, stderr io.Writer, relay relayFunc) int {
	cmd, cfg, faults, err := parseConfig(args, environ, stdout)
	switch {
	case err != nil:
	case cmd == nil: // help was asked for, and given
		return exitClean
	default:
		err = cfg.validate(cmd, faults, lookup(environ))
	}
	if err != nil {
		fmt.Fprintf(stderr, "outbox-relay: %v\n", err)
		if _, ok := cmd.(*healthcheckCommand); ok {
			return exitFailed // container engines know 0 and 1 only
		}
		return exitMisconfigured
	}

	ctx, stop := untilSignal(ctx)
	defer stop()

	std := stdio{stdout, stderr, environ}
	if _, ok := cmd.(*runCommand); ok {
		err = serveRelay(ctx, cfg, std, relay) // which logs how it ended
	} else if err = cmd.run(ctx, cfg, std); err != nil {
		fmt.Fprintf(stderr, "outbox-relay: %v\n", err)
	}
	switch {
	case err == nil:
		return exitClean
	case errors.Is(err, errShutdownOverrun):
		return exitOverrun
	case errors.Is(err, errPooler), slices.ContainsFunc(notMendedByRestart, func(kind error) bool { return errors.Is(err, kind) }):
		return exitMisconfigured
	case errors.Is(err, errFaults):
		return exitFaults
	case errors.Is(err, errUnconfirmed):
		return exitUnconfirmed
	}
	return exitFailed
}

// notMendedByRestart are the errors of migrate that somebody must do something about.
var notMendedByRestart = []error{
	migrate.ErrDSN, migrate.ErrServer, migrate.ErrPooler, migrate.ErrRights, migrate.ErrConflict,
}

// untilSignal returns a context that ends with the first SIGINT or SIGTERM. By then the next one
// has its default effect, which signal.NotifyContext does not promise.
func untilSignal(ctx context.Context) (_ context.Context, stop func()) {
	ctx, cancel := context.WithCancelCause(ctx)
	signals := make(chan os.Signal, 1)
	signal.Notify(signals, os.Interrupt, syscall.SIGTERM)
	go func() {
		var cause error
		select {
		case s := <-signals:
			cause = fmt.Errorf("%v signal received", s)
		case <-ctx.Done():
		}
		signal.Stop(signals)
		cancel(cause)
	}()
	return ctx, func() { cancel(nil) }
}

func lookup(environ []string) func(string) (string, bool) {
	values := environMap(environ)
	return func(name string) (string, bool) {
		v, ok := values[name]
		return v, ok
	}
}

// What the garbage collector is allowed. Little is alive at a time, so by default it would run some
// fifty times a second under load, which is a tenth of the relay's work; with more garbage it runs
// seldom. The limit keeps large payloads from being multiplied that way.
const (
	garbagePercent = 400
	memoryBase     = 48 << 20
	memoryPerBatch = 3       // times BATCH_BYTES: a batch and a half in hand, and the copies on their way
	memoryPerEvent = 4 << 10 // times BATCH_SIZE: room for returned messages, of two channels, and what is kept of an event in hand
)

// limitGarbage sets the garbage collector up, unless GOGC or GOMEMLIMIT did.
func limitGarbage(cfg Config, environ []string) {
	set := environMap(environ)
	if set["GOGC"] == "" && set["GOMEMLIMIT"] == "" {
		debug.SetGCPercent(garbagePercent)
		debug.SetMemoryLimit(memoryBase + memoryPerBatch*cfg.BatchBytes + memoryPerEvent*int64(cfg.BatchSize))
	}
}

// serveRelay runs relay beside the HTTP server, which starts first and stops last, until ctx is
// done or one of them fails. It logs how it ended.
func serveRelay(ctx context.Context, cfg Config, std stdio, relay relayFunc) error {
	log, err := newLogger(std.err, cfg.LogLevel, cfg.LogFormat)
	if err != nil {
		return err
	}
	log.Info("starting", "version", version, "revision", buildRevision(), "config", cfg)
	limitGarbage(cfg, std.environ)
	for _, hint := range unknownVariables(std.environ) {
		log.Warn(hint)
	}
	if err := supervise(ctx, cfg, log, relay); err != nil {
		log.Error("ended", keyErr, err)
		return err
	}
	log.Info("ended")
	return nil
}

func supervise(ctx context.Context, cfg Config, log *slog.Logger, relay relayFunc) error {
	reg := newRegistry()
	metrics := newMetrics(reg)
	health := newHealth(checkPostgres, checkRabbitMQ, checkRelay)
	srv, err := newServer(cfg, reg, health, log)
	if err != nil {
		return err
	}

	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	served := make(chan error, 1)
	go func() {
		err := srv.serve()
		if err != nil {
			cancel(err) // a relay that nobody can watch does not go on
		}
		served <- err
	}()
	relayed := make(chan error, 1)
	go func() { relayed <- recovered(func() error { return relay(ctx, cfg, log, metrics, health) }) }()

	select {
	case err = <-relayed:
		if err == nil && ctx.Err() == nil {
			err = errors.New("relay ended by itself")
		}
	case <-ctx.Done():
		log.Info("stopping", keyReason, context.Cause(ctx).Error(), "within", cfg.ShutdownTimeout)
		health.Stop()
		select {
		case err = <-relayed:
		case <-time.After(cfg.ShutdownTimeout + shutdownGrace):
			err = errShutdownOverrun // its goroutine is left behind; the process ends
		}
	}
	health.Stop()
	return errors.Join(err, srv.shutdown(context.WithoutCancel(ctx)), <-served)
}

// errPanic: a goroutine panicked.
var errPanic = errors.New("panic")

// recovered turns a panic of f into an error, since a panic would end the process with the exit
// code of a bad configuration.
func recovered(f func() error) (err error) {
	defer func() {
		if p := recover(); p != nil {
			err = fmt.Errorf("%w: %v\n%s", errPanic, p, debug.Stack())
		}
	}()
	return f()
}
