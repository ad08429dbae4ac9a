package main

import (
	"bytes"
	"net"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"time"

	"outbox-relay/internal/testenv"

	"github.com/google/go-cmp/cmp"
)

func TestHealthcheck(t *testing.T) {
	cert, key := testenv.Certificate(t)
	tlsText := "tls_server_config:\n  cert_file: " + cert + "\n  key_file: " + key + "\n"
	tests := []struct{ name, webConfig, want string }{
		{"plain", "", "200 OK"},
		{"TLS", tlsText, "200 OK"},
		{"a password", authConfig, "401 Unauthorized"},
		{"TLS and a password", tlsText + authConfig, "401 Unauthorized"},
		{"a client's certificate", tlsText + "  client_auth_type: RequireAndVerifyClientCert\n  client_ca_file: " + cert + "\n", "remote error: tls: "},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			cfg := validConfig(t)
			if tt.webConfig != "" {
				cfg.WebConfigFile = webConfig(t, tt.webConfig)
			}
			// Never ready, and alive all the same.
			cfg.HTTPAddr = testServer(t, newHealth("rabbitmq"), cfg.WebConfigFile)
			var b bytes.Buffer
			if err := runHealthcheck(t.Context(), cfg, &b); err != nil {
				t.Fatal(err)
			}
			if got := b.String(); !strings.HasPrefix(got, "alive: ") || !strings.Contains(got, tt.want) {
				t.Errorf("said %q, want %q", got, tt.want)
			}
		})
	}
}

func TestHealthcheckFindsTheServerOnAllAddresses(t *testing.T) {
	addr := testServer(t, newHealth(), "")
	_, port, err := net.SplitHostPort(addr)
	if err != nil {
		t.Fatal(err)
	}
	for _, host := range []string{"", "0.0.0.0", "[::]", "127.0.0.1", "localhost"} {
		cfg := validConfig(t)
		cfg.HTTPAddr = host + ":" + port
		var b bytes.Buffer
		if err := runHealthcheck(t.Context(), cfg, &b); err != nil {
			t.Errorf("%s: %v", cfg.HTTPAddr, err)
		}
	}
}

func TestLivezURLs(t *testing.T) {
	tests := []struct {
		addr, web string
		want      []string
	}{
		{":9090", "", []string{"http://127.0.0.1:9090/livez", "http://[::1]:9090/livez"}},
		{"0.0.0.0:80", "", []string{"http://127.0.0.1:80/livez", "http://[::1]:80/livez"}},
		{"10.1.2.3:9090", "", []string{"http://10.1.2.3:9090/livez"}},
		{"10.1.2.3:9090", "web.yml", []string{"https://10.1.2.3:9090/livez", "http://10.1.2.3:9090/livez"}},
	}
	for _, tt := range tests {
		got, err := livezURLs(Config{HTTPAddr: tt.addr, WebConfigFile: tt.web})
		if err != nil {
			t.Error(err)
		}
		if diff := cmp.Diff(tt.want, got); diff != "" {
			t.Errorf("%s: %s", tt.addr, diff)
		}
	}
	if _, err := livezURLs(Config{HTTPAddr: ":0"}); err == nil {
		t.Error("port 0: no error")
	}
}

func TestHealthcheckSaysWhyNot(t *testing.T) {
	silent, err := net.Listen("tcp", "127.0.0.1:0") // accepts, says nothing
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { silent.Close() })
	closed, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	closed.Close()
	other := httptest.NewServer(http.NotFoundHandler())
	t.Cleanup(other.Close)

	for name, tt := range map[string]struct{ addr, want string }{
		"nobody listens":          {closed.Addr().String(), "connection refused"},
		"something else listens":  {other.Listener.Addr().String(), "404 Not Found"},
		"the process has stopped": {silent.Addr().String(), "deadline exceeded"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			cfg := validConfig(t)
			cfg.HTTPAddr = tt.addr
			began := time.Now()
			var b bytes.Buffer
			err := runHealthcheck(t.Context(), cfg, &b)
			if err == nil || !strings.Contains(err.Error(), tt.want) {
				t.Errorf("err = %v, want %q", err, tt.want)
			}
			if took := time.Since(began); took > healthcheckTimeout+time.Second {
				t.Errorf("took %v", took)
			}
		})
	}
}
