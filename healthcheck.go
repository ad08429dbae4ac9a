package main

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"time"
)

// healthcheckTimeout bounds the whole check; it is below what container engines allow by default.
const healthcheckTimeout = 2 * time.Second

// runHealthcheck asks the relay in this container whether it lives, and prints what it found. It
// asks /livez, not /readyz: an engine kills what fails its check, and a relay that waits for a
// broker or a database to come back must not be killed for it.
func runHealthcheck(ctx context.Context, cfg Config, w io.Writer) error {
	ctx, cancel := context.WithTimeout(ctx, healthcheckTimeout)
	defer cancel()
	urls, err := livezURLs(cfg)
	if err != nil {
		return err
	}
	client := &http.Client{
		CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse },
		Transport: &http.Transport{
			DisableKeepAlives: true,
			// The certificate names the outside, and nothing secret is sent: no name to check.
			TLSClientConfig: &tls.Config{InsecureSkipVerify: true}, //nolint:gosec // see above
		},
	}
	var errs []error
	for _, url := range urls {
		found, err := alive(ctx, client, url)
		if err == nil {
			_, err = fmt.Fprintf(w, "alive: %s: %s\n", url, found)
			return err
		}
		errs = append(errs, err)
	}
	return errors.Join(errs...)
}

// livezURLs are the addresses to try: HTTP_ADDR with loopback in place of "all addresses".
func livezURLs(cfg Config) (urls []string, err error) {
	host, port, err := net.SplitHostPort(cfg.HTTPAddr)
	if err != nil {
		return nil, fmt.Errorf("HTTP_ADDR: %w", err)
	}
	if port == "0" {
		return nil, fmt.Errorf("HTTP_ADDR %q: the port is chosen at start, so it cannot be asked", cfg.HTTPAddr)
	}
	hosts := []string{host}
	if ip := net.ParseIP(host); host == "" || ip != nil && ip.IsUnspecified() {
		hosts = []string{"127.0.0.1", "::1"}
	}
	schemes := []string{"http"}
	if cfg.WebConfigFile != "" { // may bring TLS or only a password
		schemes = []string{"https", "http"}
	}
	for _, h := range hosts {
		for _, s := range schemes {
			urls = append(urls, s+"://"+net.JoinHostPort(h, port)+"/livez")
		}
	}
	return urls, nil
}

// alive returns what proves that the server at url lives. A server that wants a password or a
// client's certificate, or that is asked too often, lives as well as one that answers 200.
func alive(ctx context.Context, client *http.Client, url string) (string, error) {
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, url, nil)
	if err != nil {
		return "", fmt.Errorf("ask %s: %w", url, err)
	}
	resp, err := client.Do(req)
	if op := (*net.OpError)(nil); errors.As(err, &op) && op.Op == "remote error" {
		return op.Error(), nil // a TLS alert: it wants a certificate
	}
	if err != nil {
		return "", err // names method and URL
	}
	defer resp.Body.Close()
	switch resp.StatusCode {
	case http.StatusOK, http.StatusUnauthorized, http.StatusTooManyRequests:
		return resp.Status, nil
	}
	return "", fmt.Errorf("ask %s: %s", url, resp.Status)
}
