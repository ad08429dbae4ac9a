package main

import (
	"context"
	"crypto/tls"
	"io"
	"log/slog"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"outbox-relay/internal/testenv"
)

// testServer serves on a port of its own until the test ends, and returns its address.
func testServer(t *testing.T, h *Health, webConfig string) string {
	t.Helper()
	cfg := validConfig(t)
	cfg.HTTPAddr, cfg.WebConfigFile = "127.0.0.1:0", webConfig
	reg := newRegistry()
	newMetrics(reg)
	srv, err := newServer(cfg, reg, h, slog.New(slog.NewTextHandler(t.Output(), nil)))
	if err != nil {
		t.Fatal(err)
	}
	served := make(chan error, 1)
	go func() { served <- srv.serve() }()
	t.Cleanup(func() {
		http.DefaultClient.CloseIdleConnections()
		if err := srv.shutdown(context.Background()); err != nil {
			t.Error(err)
		}
		if err := <-served; err != nil {
			t.Error(err)
		}
	})
	return srv.addr()
}

// authConfig asks for a password that nobody in these tests knows; the hash has the least cost.
const authConfig = "basic_auth_users:\n  ops: $2a$04$MsAeUsQZSg2Bm6BEDyOzuuDI0wQqS2AyCnkvPEMOZOwTBIQ6/2Flq\n"

// webConfig writes a file for --web.config.file.
func webConfig(t *testing.T, text string) string {
	t.Helper()
	file := filepath.Join(t.TempDir(), "web.yml")
	if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	return file
}

func ask(t *testing.T, method, url string) (int, string) {
	t.Helper()
	req, err := http.NewRequestWithContext(t.Context(), method, url, nil)
	if err != nil {
		t.Fatal(err)
	}
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	body, err := io.ReadAll(resp.Body)
	if err != nil {
		t.Fatal(err)
	}
	return resp.StatusCode, string(body)
}

func TestServerAnswers(t *testing.T) {
	h := newHealth("postgres", "rabbitmq")
	url := "http://" + testServer(t, h, "")
	expect := func(method, path string, status int, body string) {
		t.Helper()
		gotStatus, gotBody := ask(t, method, url+path)
		if gotStatus != status || gotBody != body {
			t.Errorf("%s %s = %d %q, want %d %q", method, path, gotStatus, gotBody, status, body)
		}
	}
	expect("GET", "/livez", 200, "ok\n")
	expect("GET", "/readyz", 503, "postgres: starting\nrabbitmq: starting\n")
	h.Set("postgres", nil)
	h.Set("rabbitmq", nil)
	expect("GET", "/readyz", 200, "postgres: ok\nrabbitmq: ok\n")
	expect("HEAD", "/readyz", 200, "")
	h.Stop()
	expect("GET", "/readyz", 503, "shutting down\npostgres: ok\nrabbitmq: ok\n")
	expect("GET", "/livez", 200, "ok\n")
	expect("GET", "/", 200, landingText)
	expect("GET", "/nothing", 404, "404 page not found\n")
}

func TestServerShowsMetrics(t *testing.T) {
	url := "http://" + testServer(t, newHealth(), "")
	status, body := ask(t, "GET", url+"/metrics")
	if status != 200 {
		t.Fatal(status, body)
	}
	for _, want := range []string{"\noutbox_events_published_total 0\n", "\noutbox_build_info{", "\ngo_goroutines ", "\nprocess_start_time_seconds ", "\ngo_build_info{"} {
		if !strings.Contains(body, want) {
			t.Errorf("no %q", want)
		}
	}
}

func TestNothingChangesOverHTTP(t *testing.T) {
	url := "http://" + testServer(t, newHealth(), "")
	for _, path := range []string{"/", "/metrics", "/livez", "/readyz"} {
		for _, method := range []string{"POST", "PUT", "PATCH", "DELETE", "OPTIONS"} {
			if status, _ := ask(t, method, url+path); status != http.StatusMethodNotAllowed {
				t.Errorf("%s %s = %d, want 405", method, path, status)
			}
		}
	}
	for _, path := range []string{"/debug/pprof/", "/debug/vars", "/-/reload", "/-/quit"} {
		if status, _ := ask(t, "GET", url+path); status != http.StatusNotFound {
			t.Errorf("GET %s = %d, want 404", path, status)
		}
	}
}

func TestServerSaysWhichAddressIsTaken(t *testing.T) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	cfg := validConfig(t)
	cfg.HTTPAddr = l.Addr().String()
	_, err = newServer(cfg, newRegistry(), newHealth(), slog.New(slog.DiscardHandler))
	if err == nil || !strings.Contains(err.Error(), "HTTP_ADDR") || !strings.Contains(err.Error(), "address already in use") {
		t.Errorf("err = %v", err)
	}
}

func TestServerAsksForThePassword(t *testing.T) {
	addr := testServer(t, newHealth(), webConfig(t, authConfig))
	if status, _ := ask(t, "GET", "http://"+addr+"/metrics"); status != http.StatusUnauthorized {
		t.Errorf("status = %d, want 401", status)
	}
}

func TestServerSpeaksTLS(t *testing.T) {
	cert, key := testenv.Certificate(t)
	addr := testServer(t, newHealth(), webConfig(t, "tls_server_config:\n  cert_file: "+cert+"\n  key_file: "+key+"\n"))
	client := &http.Client{Transport: &http.Transport{DisableKeepAlives: true, TLSClientConfig: &tls.Config{InsecureSkipVerify: true}}}
	resp, err := client.Get("https://" + addr + "/livez")
	if err != nil {
		t.Fatal(err)
	}
	resp.Body.Close()
	if resp.StatusCode != http.StatusOK {
		t.Error(resp.Status)
	}
}

// TestServerShutdownIsBounded holds a request open that never ends.
func TestServerShutdownIsBounded(t *testing.T) {
	cfg := validConfig(t)
	cfg.HTTPAddr = "127.0.0.1:0"
	srv, err := newServer(cfg, newRegistry(), newHealth(), slog.New(slog.DiscardHandler))
	if err != nil {
		t.Fatal(err)
	}
	served := make(chan error, 1)
	go func() { served <- srv.serve() }()
	conn, err := net.Dial("tcp", srv.addr())
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	// One whole request, so that the server is known to have the connection, and half of another.
	if _, err := io.WriteString(conn, "GET /livez HTTP/1.1\r\nHost: x\r\n\r\nGET /live"); err != nil {
		t.Fatal(err)
	}
	if _, err := conn.Read(make([]byte, 1)); err != nil {
		t.Fatal(err)
	}
	began := time.Now()
	_ = srv.shutdown(context.Background()) // may or may not have cut the connection
	if took := time.Since(began); took > httpShutdownTimeout+2*time.Second {
		t.Errorf("shutdown took %v", took)
	}
	if err := <-served; err != nil {
		t.Error(err)
	}
}
