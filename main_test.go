package main

import (
	"bytes"
	"context"
	"errors"
	"io"
	"log/slog"
	"net/http"
	"os"
	"os/exec"
	"regexp"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"
)

// nowhere is a valid environment whose servers refuse connections.
var nowhere = []string{
	"DATABASE_URL=postgres://app:hunter2@127.0.0.1:1/orders?sslmode=disable&connect_timeout=1",
	"AMQP_URL=amqp://app:hunter2@127.0.0.1:1",
	"HTTP_ADDR=127.0.0.1:0",
}

func TestExitCodes(t *testing.T) {
	tests := []struct {
		name           string
		args, environ  []string
		code           int
		stdout, stderr string // a part of it
	}{
		{"help", []string{"-h"}, nil, exitClean, "--database-url=STRING", ""},
		{"help of a command", []string{"migrate", "--help"}, nil, exitClean, "$DATABASE_URL", ""},
		{"version", []string{"version"}, nil, exitClean, "outbox-relay dev (revision ", ""},
		{"no configuration", nil, nil, exitMisconfigured, "", "configuration: 2 faults\n  DATABASE_URL: not set"},
		{"an unknown flag", []string{"--nothing"}, validEnviron, exitMisconfigured, "", "unknown flag --nothing"},
		{"an unknown command", []string{"start"}, validEnviron, exitMisconfigured, "", "command line: unexpected argument"},
		{"an address that cannot be bound", []string{"--http-addr=192.0.2.1:9090"}, validEnviron, exitFailed, "", "HTTP_ADDR"},
		{"migrate without a server", []string{"migrate"}, nowhere, exitFailed, "", "outbox-relay: "},
		{"migrate without a database", []string{"migrate"}, nil, exitMisconfigured, "", "DATABASE_URL: not set"},
		{"healthcheck without a relay", []string{"healthcheck", "--http-addr=127.0.0.1:1"}, nil, exitFailed, "", "connection refused"},
		{"healthcheck misconfigured", []string{"healthcheck", "--http-addr=x"}, nil, exitFailed, "", "HTTP_ADDR"},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			var stdout, stderr bytes.Buffer
			if got := run(t.Context(), tt.args, tt.environ, &stdout, &stderr); got != tt.code {
				t.Errorf("code = %d, want %d", got, tt.code)
			}
			if !strings.Contains(stdout.String(), tt.stdout) || tt.stdout == "" && stdout.Len() > 0 {
				t.Errorf("stdout = %q, want %q", &stdout, tt.stdout)
			}
			if !strings.Contains(stderr.String(), tt.stderr) || tt.stderr == "" && stderr.Len() > 0 {
				t.Errorf("stderr = %q, want %q", &stderr, tt.stderr)
			}
			if strings.Contains(stderr.String(), "hunter2") {
				t.Errorf("a password in %s", &stderr)
			}
		})
	}
}

// TestRunWaitsForItsServersAndEndsInOrder starts a relay whose servers are down: it lives, is not
// ready, says why, and ends at once when told to.
func TestRunWaitsForItsServersAndEndsInOrder(t *testing.T) {
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	var stderr syncBuffer
	code := make(chan int, 1)
	go func() { code <- run(ctx, nil, append(slices.Clone(nowhere), "AMQP_EXCHANGES=x"), io.Discard, &stderr) }()

	addr := stderr.await(t, regexp.MustCompile(`"address":"(127\.0\.0\.1:\d+)"`))
	defer http.DefaultClient.CloseIdleConnections()
	if status, _ := ask(t, "GET", "http://"+addr+"/livez"); status != http.StatusOK {
		t.Errorf("livez = %d", status)
	}
	if status, body := ask(t, "GET", "http://"+addr+"/readyz"); status != http.StatusServiceUnavailable || strings.Contains(body, "hunter2") {
		t.Errorf("readyz = %d %s", status, body)
	}
	if got := run(ctx, []string{"healthcheck"}, []string{"HTTP_ADDR=" + addr}, io.Discard, io.Discard); got != exitClean {
		t.Errorf("healthcheck = %d", got)
	}
	cancel()
	select {
	case got := <-code:
		if got != exitClean {
			t.Errorf("code = %d\n%s", got, &stderr)
		}
	case <-time.After(20 * time.Second):
		t.Fatal("still running")
	}
	for _, want := range []string{"did you mean AMQP_EXCHANGE?", `"database_url":"postgres://app@127.0.0.1:1/orders"`, `"msg":"stopping"`, `"msg":"ended"`} {
		if !strings.Contains(stderr.String(), want) {
			t.Errorf("no %s in\n%s", want, &stderr)
		}
	}
	if strings.Contains(stderr.String(), "hunter2") {
		t.Errorf("a password in\n%s", &stderr)
	}
}

// supervised runs f as the relay until it ends, with ctx done after f has begun if stop is set.
func supervised(t *testing.T, stop bool, f relayFunc) error {
	t.Helper()
	cfg := validConfig(t)
	cfg.HTTPAddr, cfg.ShutdownTimeout = "127.0.0.1:0", 200*time.Millisecond
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	return supervise(ctx, cfg, slog.New(slog.DiscardHandler), func(ctx context.Context, cfg Config, log *slog.Logger, m *Metrics, h *Health) error {
		if stop {
			cancel()
		}
		return f(ctx, cfg, log, m, h)
	})
}

func TestSupervise(t *testing.T) {
	failure := errors.New("no work lock")
	until := make(chan struct{})
	t.Cleanup(func() { close(until) })
	tests := []struct {
		name string
		stop bool
		f    relayFunc
		is   error
		says string
	}{
		{"ended when told to", true, func(ctx context.Context, _ Config, _ *slog.Logger, _ *Metrics, _ *Health) error {
			<-ctx.Done()
			return nil
		}, nil, ""},
		{"not ready while it ends", true, func(ctx context.Context, _ Config, _ *slog.Logger, _ *Metrics, h *Health) error {
			<-ctx.Done()
			for {
				if _, lines := h.Ready(); lines[0] == "shutting down" {
					return nil
				}
				time.Sleep(time.Millisecond)
			}
		}, nil, ""},
		{"failed", false, func(context.Context, Config, *slog.Logger, *Metrics, *Health) error { return failure }, failure, "no work lock"},
		{"ended without being told", false, func(context.Context, Config, *slog.Logger, *Metrics, *Health) error { return nil }, nil, "relay ended by itself"},
		{"says itself that the time was too short", true, func(context.Context, Config, *slog.Logger, *Metrics, *Health) error { return errShutdownOverrun }, errShutdownOverrun, ""},
		{"does not end", true, func(context.Context, Config, *slog.Logger, *Metrics, *Health) error {
			<-until
			return nil
		}, errShutdownOverrun, ""},
		{"panics", false, func(context.Context, Config, *slog.Logger, *Metrics, *Health) error { panic("out of range") }, nil, "panic: out of range"},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			err := supervised(t, tt.stop, tt.f)
			wantErr := tt.is != nil || tt.says != ""
			if (err != nil) != wantErr || tt.is != nil && !errors.Is(err, tt.is) || wantErr && !strings.Contains(err.Error(), tt.says) {
				t.Errorf("err = %v, want %v %q", err, tt.is, tt.says)
			}
		})
	}
}

// TestSignals runs this test binary as a relay of its own, since signals are of a process.
func TestSignals(t *testing.T) {
	if os.Getenv("RUN_AS_RELAY") != "" {
		// Busy for longer than the test: only a second signal can end it before its time.
		relay := func(ctx context.Context, _ Config, log *slog.Logger, _ *Metrics, _ *Health) error {
			log.Info("working")
			<-ctx.Done()
			if os.Getenv("RUN_AS_RELAY") == "stubborn" {
				time.Sleep(time.Minute)
			}
			return nil
		}
		os.Exit(runWith(context.Background(), nil, append(slices.Clone(nowhere), "SHUTDOWN_TIMEOUT=50s"), os.Stdout, os.Stderr, relay))
	}
	start := func(t *testing.T, mode string) (*exec.Cmd, *syncBuffer) {
		cmd := exec.Command(os.Args[0], "-test.run=^TestSignals$")
		cmd.Env = append(os.Environ(), "RUN_AS_RELAY="+mode)
		var b syncBuffer
		cmd.Stderr = &b
		if err := cmd.Start(); err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = cmd.Process.Kill() })
		b.await(t, regexp.MustCompile(`"msg":"(working)"`))
		return cmd, &b
	}
	signal := func(t *testing.T, cmd *exec.Cmd, s syscall.Signal) {
		if err := cmd.Process.Signal(s); err != nil {
			t.Fatal(err)
		}
	}
	for _, s := range []syscall.Signal{syscall.SIGTERM, syscall.SIGINT} {
		t.Run(s.String()+" ends it in order", func(t *testing.T) {
			t.Parallel()
			cmd, log := start(t, "obedient")
			signal(t, cmd, s)
			if err := cmd.Wait(); err != nil {
				t.Errorf("%v\n%s", err, log)
			}
		})
	}
	t.Run("a second signal ends it at once", func(t *testing.T) {
		t.Parallel()
		cmd, log := start(t, "stubborn")
		signal(t, cmd, syscall.SIGTERM)
		log.await(t, regexp.MustCompile(`"msg":"(stopping)"`))
		signal(t, cmd, syscall.SIGTERM)
		var exit *exec.ExitError
		if err := cmd.Wait(); !errors.As(err, &exit) || exit.Sys().(syscall.WaitStatus).Signal() != syscall.SIGTERM {
			t.Errorf("%v\n%s", err, log)
		}
	})
}

// syncBuffer is a buffer that one goroutine writes and another reads.
type syncBuffer struct {
	mu sync.Mutex // guards b
	b  bytes.Buffer
}

func (s *syncBuffer) Write(p []byte) (int, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.b.Write(p)
}

func (s *syncBuffer) String() string {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.b.String()
}

// await returns what the first group of re matches, once it does.
func (s *syncBuffer) await(t *testing.T, re *regexp.Regexp) string {
	t.Helper()
	for deadline := time.Now().Add(20 * time.Second); time.Now().Before(deadline); time.Sleep(5 * time.Millisecond) {
		if m := re.FindStringSubmatch(s.String()); m != nil {
			return m[1]
		}
	}
	t.Fatalf("no %s in\n%s", re, s)
	return ""
}
