package testenv

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"
)

// endTimeout bounds how long a relay may take to end after a signal; its own limit is below.
const endTimeout = 30 * time.Second

// binary builds the relay, with the race detector if the tests have it.
var binary = sync.OnceValues(func() (string, error) {
	root, err := moduleRoot()
	if err != nil {
		return "", err
	}
	dir, err := os.MkdirTemp("", "outbox-relay-test")
	if err != nil {
		return "", err
	}
	onEnd(func() { report(os.RemoveAll(dir)) })
	args := []string{"build", "-o", filepath.Join(dir, "outbox-relay")}
	if raceEnabled {
		args = append(args, "-race")
	}
	cmd := exec.Command("go", append(args, ".")...)
	cmd.Dir = root
	if out, err := cmd.CombinedOutput(); err != nil {
		return "", fmt.Errorf("go %s: %w\n%s", strings.Join(args, " "), err, out)
	}
	return filepath.Join(dir, "outbox-relay"), nil
})

// Binary returns the path of the relay: RELAY_BINARY, or one built from this checkout once for a run of
// the package.
func Binary(t testing.TB) string {
	t.Helper()
	if path := os.Getenv("RELAY_BINARY"); path != "" {
		return path
	}
	path, err := binary()
	if err != nil {
		t.Fatal(err)
	}
	return path
}

// Process is a relay that runs as a child. Safe for concurrent use.
type Process struct {
	HTTPAddr string // host:port of /metrics, /livez and /readyz

	cmd   *exec.Cmd
	log   logBuffer
	ended chan struct{} // closed after code is set
	code  int
}

// Start runs the relay, `outbox-relay run`, with these NAME=value settings and nothing else of the
// test's environment. It listens on a free port unless HTTP_ADDR is among them. At the test's end it is
// killed if it still runs, and its log is shown if the test failed.
func Start(t testing.TB, env ...string) *Process {
	t.Helper()
	return StartCommand(t, env, "run")
}

// StartCommand is Start for another command.
func StartCommand(t testing.TB, env []string, args ...string) *Process {
	t.Helper()
	p := &Process{ended: make(chan struct{})}
	for _, e := range env {
		if addr, ok := strings.CutPrefix(e, "HTTP_ADDR="); ok {
			p.HTTPAddr = addr
		}
	}
	if p.HTTPAddr == "" {
		p.HTTPAddr = "127.0.0.1:" + strconv.Itoa(FreePort(t))
		env = append(env[:len(env):len(env)], "HTTP_ADDR="+p.HTTPAddr)
	}
	p.cmd = command(t, env, args)
	p.cmd.Stdout, p.cmd.Stderr = &p.log, &p.log
	if err := p.cmd.Start(); err != nil {
		t.Fatal(err)
	}
	go func() {
		_ = p.cmd.Wait() // the exit code says it all
		p.code = p.cmd.ProcessState.ExitCode()
		close(p.ended)
	}()
	t.Cleanup(func() {
		_ = p.cmd.Process.Kill()
		<-p.ended
		logs := p.Logs()
		if strings.Contains(logs, "WARNING: DATA RACE") {
			t.Error("the relay has a data race")
		}
		if t.Failed() {
			t.Logf("log of outbox-relay %s:\n%s", strings.Join(args, " "), logs)
		}
	})
	return p
}

// Command runs the relay's command to its end and returns the exit code and what it printed.
func Command(t testing.TB, env []string, args ...string) (code int, stdout, stderr string) {
	t.Helper()
	cmd := command(t, env, args)
	var out, errs bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &errs
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	timer := time.AfterFunc(time.Minute, func() { _ = cmd.Process.Kill() })
	defer timer.Stop()
	_ = cmd.Wait()
	return cmd.ProcessState.ExitCode(), out.String(), errs.String()
}

func command(t testing.TB, env, args []string) *exec.Cmd {
	t.Helper()
	cmd := exec.Command(Binary(t), args...)
	cmd.Dir = t.TempDir()
	// What a process needs anywhere; settings of the relay come from the test alone.
	for _, name := range []string{"PATH", "HOME", "TMPDIR", "GOCOVERDIR"} {
		if value, ok := os.LookupEnv(name); ok {
			cmd.Env = append(cmd.Env, name+"="+value)
		}
	}
	cmd.Env = append(cmd.Env, env...)
	dieWithParent(cmd)
	return cmd
}

// Signal sends a signal: SIGSTOP freezes the relay, SIGCONT lets it go on, SIGKILL is a crash.
func (p *Process) Signal(t testing.TB, sig syscall.Signal) {
	t.Helper()
	if err := p.cmd.Process.Signal(sig); err != nil {
		t.Fatalf("signal the relay: %v", err)
	}
}

// Stop sends SIGTERM, waits for the end and returns the exit code.
func (p *Process) Stop(t testing.TB) int {
	t.Helper()
	p.Signal(t, syscall.SIGTERM)
	return p.Wait(t, endTimeout)
}

// Kill sends SIGKILL and waits for the end.
func (p *Process) Kill(t testing.TB) {
	t.Helper()
	p.Signal(t, syscall.SIGKILL)
	p.Wait(t, endTimeout)
}

// Wait waits until the relay has ended and returns its exit code, -1 if a signal ended it. It fails
// the test after timeout; the stacks of all goroutines are then in the log.
func (p *Process) Wait(t testing.TB, timeout time.Duration) int {
	t.Helper()
	select {
	case <-p.ended:
		return p.code
	case <-time.After(timeout):
	}
	_ = p.cmd.Process.Signal(syscall.SIGQUIT)
	select {
	case <-p.ended:
	case <-time.After(5 * time.Second):
	}
	t.Fatalf("the relay has not ended within %v", timeout)
	return -1
}

// Running reports whether the relay has not ended yet.
func (p *Process) Running() bool {
	select {
	case <-p.ended:
		return false
	default:
		return true
	}
}

// Ready waits until /readyz answers 200.
func (p *Process) Ready(t testing.TB) {
	t.Helper()
	p.awaitStatus(t, http.StatusOK)
}

// NotReady waits until /readyz answers 503 and returns its reasons.
func (p *Process) NotReady(t testing.TB) string {
	t.Helper()
	return p.awaitStatus(t, http.StatusServiceUnavailable)
}

func (p *Process) awaitStatus(t testing.TB, want int) (body string) {
	t.Helper()
	var status int
	var err error
	deadline := time.Now().Add(time.Minute)
	for {
		status, body, err = get("http://" + p.HTTPAddr + "/readyz")
		switch {
		case err == nil && status == want:
			return body
		case !p.Running():
			t.Fatalf("/readyz: the relay has ended with code %d, want status %d", p.code, want)
		case time.Now().After(deadline):
			t.Fatalf("/readyz = %d %s %v, want status %d", status, body, err, want)
		}
		time.Sleep(pollEvery)
	}
}

// Get fetches a path of the relay's HTTP server, and waits for that where the relay has just begun.
func (p *Process) Get(t testing.TB, path string) (status int, body string) {
	t.Helper()
	deadline := time.Now().Add(10 * time.Second)
	for {
		status, body, err := get("http://" + p.HTTPAddr + path)
		if err == nil {
			return status, body
		}
		if !errors.Is(err, syscall.ECONNREFUSED) || !p.Running() || time.Now().After(deadline) {
			t.Fatal(err)
		}
		time.Sleep(pollEvery)
	}
}

// Metric returns a metric's value, the sum over its series whose labels contain all of labels, such as
// `cause="notify"`. Without any such series it is 0.
func (p *Process) Metric(t testing.TB, name string, labels ...string) float64 {
	t.Helper()
	_, body := p.Get(t, "/metrics")
	var sum float64
	lines := bufio.NewScanner(strings.NewReader(body))
next:
	for lines.Scan() {
		rest, ok := strings.CutPrefix(lines.Text(), name)
		if !ok || rest == "" || rest[0] != ' ' && rest[0] != '{' {
			continue
		}
		for _, label := range labels {
			if !strings.Contains(rest, label) {
				continue next
			}
		}
		v, err := strconv.ParseFloat(rest[strings.LastIndexByte(rest, ' ')+1:], 64)
		if err != nil {
			t.Fatalf("metric %s: %v", name, err)
		}
		sum += v
	}
	return sum
}

// Logs returns what the relay has written so far, both streams.
func (p *Process) Logs() string { return p.log.String() }

// WaitLog waits until the relay has written text.
func (p *Process) WaitLog(t testing.TB, timeout time.Duration, text string) {
	t.Helper()
	Eventually(t, timeout, "the relay logs "+strconv.Quote(text), func() bool {
		return strings.Contains(p.Logs(), text)
	})
}

func get(url string) (status int, body string, err error) {
	ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
	defer cancel()
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, url, nil)
	if err != nil {
		return 0, "", err
	}
	req.Close = true // an idle connection would look like a leak
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		return 0, "", err
	}
	defer func() { _ = resp.Body.Close() }()
	b, err := io.ReadAll(resp.Body)
	return resp.StatusCode, string(b), err
}

// logBuffer collects a child's output. Written by os/exec, read by the test.
type logBuffer struct {
	mu  sync.Mutex
	buf bytes.Buffer
}

func (b *logBuffer) Write(p []byte) (int, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.buf.Write(p)
}

func (b *logBuffer) String() string {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.buf.String()
}
