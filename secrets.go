package main

import (
	"errors"
	"fmt"
	"io"
	"os"
	"strings"

	"outbox-relay/internal/serverurl"
)

// maxSecretBytes is far over any URL; it keeps a wrong path (a device, a log) from being read whole.
const maxSecretBytes = 64 << 10

// databaseDSN returns the DSN in a form that lib/pq takes, with a connect_timeout and an
// application_name. A file is read at each call, so a changed password is used at the next
// connect. Errors hold nothing that could belong to a password.
func (c Config) databaseDSN() (string, error) {
	raw, err := secret(c.DatabaseURL, c.DatabaseURLFile)
	if err != nil {
		return "", fmt.Errorf("DATABASE_URL: %w", err)
	}
	dsn, faults := serverurl.PrepareDSN(raw)
	if len(faults) > 0 {
		return "", fmt.Errorf("DATABASE_URL: %s", strings.Join(faults, "; "))
	}
	return dsn, nil
}

// amqpURLs returns the brokers to try in turn; what is said of databaseDSN holds here too.
func (c Config) amqpURLs() ([]string, error) {
	list, err := secret(c.AMQPURL, c.AMQPURLFile)
	if err != nil {
		return nil, fmt.Errorf("AMQP_URL: %w", err)
	}
	urls := serverurl.SplitAMQP(list)
	for i, u := range urls {
		if faults := serverurl.CheckAMQP(u); len(faults) > 0 {
			return nil, fmt.Errorf("AMQP_URL, number %d: %s", i+1, strings.Join(faults, "; "))
		}
	}
	return urls, nil
}

// secret returns the value itself, or what its file holds now, without the line end that editors
// and `echo` leave.
func secret(value, file string) (string, error) {
	if file == "" {
		if value == "" {
			return "", errors.New("not set")
		}
		return value, nil
	}
	f, err := os.Open(file)
	if err != nil {
		return "", err
	}
	defer f.Close()
	b, err := io.ReadAll(io.LimitReader(f, maxSecretBytes+1))
	if err != nil {
		return "", err
	}
	text := strings.TrimRight(string(b), "\r\n")
	switch {
	case len(b) > maxSecretBytes:
		return "", fmt.Errorf("%s: over %d bytes", file, maxSecretBytes)
	case strings.TrimSpace(text) == "":
		return "", fmt.Errorf("%s: empty", file)
	case strings.ContainsAny(text, "\r\n"):
		return "", errors.New(file + ": more than one line")
	}
	return text, nil
}

// redacted is what may be said of a URL or DSN in logs and messages: user, host, port and
// database or virtual host, never a password.
func redacted(raw string) string {
	if strings.HasPrefix(raw, "amqp") {
		return serverurl.RedactAMQP(raw)
	}
	return serverurl.RedactDSN(raw)
}
