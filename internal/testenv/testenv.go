// Package testenv gives tests a real PostgreSQL and a real RabbitMQ, and runs the relay against them.
//
// The servers are containers, one of each for a run of a test package, started when the first test
// asks for them and removed by [Main]. Tests do not share what they may break: each has a database
// ([Database]) and a vhost ([Vhost]) of its own, and one that stops or starves a server starts one
// of its own ([OwnPostgres], [OwnRabbitMQ]).
//
// Environment, all of it optional:
//
//	TEST_DATABASE_URL     a PostgreSQL that already runs, as a user that may create databases
//	TEST_AMQP_URL         a RabbitMQ that already runs, as an administrator
//	TEST_RABBITMQ_API_URL its management API; default http:// on port 15672 of the same host
//	POSTGRES_IMAGE        image of the container; default is what test/images/provide finds
//	RABBITMQ_IMAGE        likewise
//	PROMETHEUS_IMAGE      image for [Promtool] and [Prometheus]; default is what test/images/provide finds
//	TEST_RUN_ID           value of the label outbox-relay.test of all containers; default is the process id
//	RELAY_BINARY          the relay to run; default is built from this checkout
//	RELAY_IMAGE           image for [RunImage]; default is built from this checkout
//
// Without a server and without Docker the tests fail and say what to set; with -short those that
// need a server are skipped. All functions may be called from several tests at once, and several
// packages may run at once.
package testenv

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"net"
	"os"
	"os/signal"
	"path/filepath"
	"runtime"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"go.uber.org/goleak"
)

// startTimeout bounds how long a server may take to start on a busy machine.
const startTimeout = 2 * time.Minute

// Main runs a package's tests and ends the process; call it from TestMain. It removes what the
// tests started, also on SIGINT and SIGTERM, and fails the run if goroutines are left over, except
// those that leaks names. Each of these needs its reason beside it.
func Main(m *testing.M, leaks ...goleak.Option) {
	signals := make(chan os.Signal, 1)
	signal.Notify(signals, os.Interrupt, syscall.SIGTERM)
	ended := make(chan struct{})
	var watch sync.WaitGroup
	watch.Go(func() {
		select {
		case <-signals:
			tidy()
			os.Exit(130)
		case <-ended:
		}
	})

	code := m.Run()
	signal.Stop(signals)
	close(ended)
	watch.Wait()
	tidy()
	if code == 0 {
		// os/signal keeps one goroutine for the life of the process once Notify was called.
		leaks = append(leaks, goleak.IgnoreTopFunction("os/signal.signal_recv"))
		if err := goleak.Find(leaks...); err != nil {
			fmt.Fprintln(os.Stderr, "testenv: goroutines are left over:", err)
			code = 1
		}
	}
	os.Exit(code)
}

// atEnd holds what tidy runs, the last added first. Guarded by atEndMu.
var (
	atEndMu sync.Mutex
	atEnd   []func()
)

func onEnd(f func()) {
	atEndMu.Lock()
	defer atEndMu.Unlock()
	atEnd = append(atEnd, f)
}

func tidy() {
	atEndMu.Lock()
	defer atEndMu.Unlock()
	for len(atEnd) > 0 {
		last := len(atEnd) - 1
		atEnd[last]()
		atEnd = atEnd[:last]
	}
}

// Short skips the test under -short. Everything in this package that needs a server calls it.
func Short(t testing.TB) {
	t.Helper()
	if testing.Short() {
		t.Skip("needs real servers: left out by -short")
	}
}

// Eventually waits until cond holds, and fails the test when it does not within timeout. what says
// what is awaited: "the queue is empty".
func Eventually(t testing.TB, timeout time.Duration, what string, cond func() bool) {
	t.Helper()
	deadline := time.Now().Add(timeout)
	for !cond() {
		if time.Now().After(deadline) {
			t.Fatalf("waited %v in vain until %s", timeout, what)
		}
		time.Sleep(pollEvery)
	}
}

// pollEvery is how often a condition is looked at that cannot announce itself.
const pollEvery = 10 * time.Millisecond

// retry calls f until it succeeds or ctx ends, and then returns f's last error.
func retry(ctx context.Context, f func(context.Context) error) error {
	for {
		err := f(ctx)
		if err == nil || errors.Is(err, errGivenUp) {
			return err
		}
		select {
		case <-ctx.Done():
			return err
		case <-time.After(5 * pollEvery):
		}
	}
}

// errGivenUp marks errors that another try does not cure.
var errGivenUp = errors.New("given up")

// FreePort returns a TCP port of 127.0.0.1 that nobody listens on. It is not one that the kernel
// hands out by itself, so it stays free while the server that uses it is down.
func FreePort(t testing.TB) int {
	t.Helper()
	port, err := freePort()
	if err != nil {
		t.Fatal(err)
	}
	return port
}

func freePort() (int, error) {
	for range 100 {
		port := 20000 + rand.IntN(12000) // below the ephemeral range, which begins at 32768
		l, err := net.Listen("tcp", fmt.Sprintf("127.0.0.1:%d", port))
		if err == nil {
			return port, l.Close()
		}
	}
	return 0, errors.New("no free port between 20000 and 32000")
}

// uniqueName makes a name of at most 60 bytes, [a-z0-9_] only, that tells the test and is unique.
func uniqueName(t testing.TB) string {
	name := strings.Map(func(r rune) rune {
		switch {
		case r >= 'a' && r <= 'z', r >= '0' && r <= '9':
			return r
		case r >= 'A' && r <= 'Z':
			return r - 'A' + 'a'
		}
		return '_'
	}, strings.TrimPrefix(t.Name(), "Test"))
	return fmt.Sprintf("t_%.45s_%08x", name, rand.Uint32())
}

// moduleRoot returns the directory of the module's go.mod.
var moduleRoot = sync.OnceValues(func() (string, error) {
	_, file, _, _ := runtime.Caller(0)
	if dir := filepath.Dir(filepath.Dir(filepath.Dir(file))); filepath.IsAbs(dir) {
		return dir, nil
	}
	// Built with -trimpath: tests run in their package's directory, somewhere below the root.
	dir, err := os.Getwd()
	for ; err == nil; dir = filepath.Dir(dir) {
		if _, statErr := os.Stat(filepath.Join(dir, "go.mod")); statErr == nil {
			return dir, nil
		}
		if dir == filepath.Dir(dir) {
			return "", errors.New("no go.mod above the working directory")
		}
	}
	return "", err
})
