package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"strings"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/collectors"
	"github.com/prometheus/client_golang/prometheus/promhttp"
	"github.com/prometheus/exporter-toolkit/web"
)

// Limits of HTTP. Requests are tiny and answers small, so whatever takes longer is not meant well.
const (
	httpHeaderTimeout   = 5 * time.Second
	httpRequestTimeout  = 10 * time.Second
	httpIdleTimeout     = time.Minute
	httpMaxHeaderBytes  = 16 << 10
	httpShutdownTimeout = time.Second
)

// server answers /metrics, /livez and /readyz. It starts first and stops last, so that a relay
// can be asked what it waits for. Nothing about the relay can be changed through it.
type server struct {
	listener  net.Listener
	http      *http.Server
	webConfig string
	log       *slog.Logger
}

// newServer binds HTTP_ADDR; from then on connections queue up until serve is called.
func newServer(cfg Config, reg *prometheus.Registry, h *Health, log *slog.Logger) (*server, error) {
	l, err := net.Listen("tcp", cfg.HTTPAddr)
	if err != nil {
		return nil, fmt.Errorf("bind HTTP_ADDR %q: %w", cfg.HTTPAddr, err)
	}
	errorLog := slog.NewLogLogger(log.Handler(), slog.LevelWarn)
	return &server{
		listener:  l,
		webConfig: cfg.WebConfigFile,
		log:       log,
		http: &http.Server{
			Handler:           newMux(reg, h, errorLog),
			ErrorLog:          errorLog,
			ReadHeaderTimeout: httpHeaderTimeout,
			ReadTimeout:       httpRequestTimeout,
			WriteTimeout:      httpRequestTimeout,
			IdleTimeout:       httpIdleTimeout,
			MaxHeaderBytes:    httpMaxHeaderBytes,
		},
	}, nil
}

// addr is where the server listens, with the port that was chosen for port 0.
func (s *server) addr() string { return s.listener.Addr().String() }

// serve answers until shutdown is called, and then returns nil.
func (s *server) serve() error {
	err := web.Serve(s.listener, s.http, &web.FlagConfig{WebConfigFile: &s.webConfig}, s.log)
	if errors.Is(err, http.ErrServerClosed) {
		return nil
	}
	return fmt.Errorf("serve HTTP: %w", err)
}

// shutdown stops to listen, lets requests in hand finish for a second and cuts them off then.
func (s *server) shutdown(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, httpShutdownTimeout)
	defer cancel()
	if err := s.http.Shutdown(ctx); err != nil {
		return errors.Join(fmt.Errorf("shut down HTTP: %w", err), s.http.Close())
	}
	return nil
}

const landingText = `outbox-relay publishes the events of a transactional outbox in PostgreSQL to RabbitMQ.

/metrics  for Prometheus
/livez    200 while the process serves
/readyz   200 when the relay can do its work, else 503; a line on each check
`

// newMux routes requests. Each pattern allows GET and HEAD only; the mux answers 405 to others.
func newMux(reg *prometheus.Registry, h *Health, errorLog promhttp.Logger) *http.ServeMux {
	text := func(w http.ResponseWriter, status int, body string) {
		w.Header().Set("Content-Type", "text/plain; charset=utf-8")
		w.Header().Set("Cache-Control", "no-store")
		w.WriteHeader(status)
		_, _ = io.WriteString(w, body) // the client left: nobody to tell
	}
	mux := http.NewServeMux()
	mux.Handle("GET /metrics", promhttp.HandlerFor(reg, promhttp.HandlerOpts{ErrorLog: errorLog, EnableOpenMetrics: true}))
	mux.HandleFunc("GET /livez", func(w http.ResponseWriter, _ *http.Request) {
		text(w, http.StatusOK, "ok\n")
	})
	mux.HandleFunc("GET /readyz", func(w http.ResponseWriter, _ *http.Request) {
		status := http.StatusOK
		ok, lines := h.Ready()
		if !ok {
			status = http.StatusServiceUnavailable
		}
		text(w, status, strings.Join(lines, "\n")+"\n")
	})
	mux.HandleFunc("GET /{$}", func(w http.ResponseWriter, _ *http.Request) {
		text(w, http.StatusOK, landingText)
	})
	return mux
}

// newRegistry makes the registry that /metrics shows, with what every Go process has.
func newRegistry() *prometheus.Registry {
	reg := prometheus.NewRegistry()
	reg.MustRegister(
		collectors.NewGoCollector(),
		collectors.NewProcessCollector(collectors.ProcessCollectorOpts{}),
		collectors.NewBuildInfoCollector(),
	)
	registerBuildInfo(reg)
	return reg
}
