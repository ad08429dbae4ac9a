package serverurl

import (
	"crypto/tls"
	"crypto/x509"
	"fmt"
	"maps"
	"net"
	"net/url"
	"os"
	"regexp"
	"slices"
	"strconv"
	"strings"

	amqp "github.com/rabbitmq/amqp091-go"
)

// amqpParameters are those of a URL that amqp091-go heeds; it ignores all others silently, TLS
// settings with a slip in their name included.
var amqpParameters = []string{
	"auth_mechanism", "cacertfile", "certfile", "channel_max", "connection_timeout",
	"heartbeat", "keyfile", "server_name_indication",
}

// amqpComma matches a comma that ends one URL of a list; others may be part of a password.
var amqpComma = regexp.MustCompile(`,\s*(amqps?://)`)

// SplitAMQP splits a list of URLs at the commas before a scheme.
func SplitAMQP(list string) []string {
	parts := strings.Split(amqpComma.ReplaceAllString(strings.TrimSpace(list), "\n$1"), "\n")
	for i := range parts {
		parts[i] = strings.TrimSpace(parts[i])
	}
	return parts
}

// CheckAMQP returns what is wrong with one URL, without any part that could belong to a
// password. The files it names are another matter, see CheckTLSFiles.
func CheckAMQP(raw string) (faults []string) {
	if !strings.HasPrefix(raw, "amqp://") && !strings.HasPrefix(raw, "amqps://") {
		return []string{"the scheme must be amqp:// or amqps://"}
	}
	if strings.HasSuffix(raw, ",") {
		return []string{"ends with a comma, and no URL follows: remove it, or write %2C if it belongs to the virtual host"}
	}
	u, bad := parseURL(raw)
	if bad != "" {
		return []string{bad}
	}
	if strings.ContainsFunc(raw, func(r rune) bool { return r == ' ' || r == '\t' }) {
		return []string{"has a space in it; write it as %20"}
	}
	for _, name := range slices.Sorted(maps.Keys(u.Query())) {
		if !slices.Contains(amqpParameters, name) {
			faults = append(faults, fmt.Sprintf("parameter %q would be ignored; known are %s", name, strings.Join(amqpParameters, ", ")))
		}
	}
	if _, err := amqp.ParseURI(raw); err != nil {
		faults = append(faults, scrubAMQP(err))
	}
	return faults
}

// CheckTLSFiles finds what amqp091-go would pass over in silence or report at the first connect
// of an amqps URL. Done at start only: files may be in the middle of a change later.
func CheckTLSFiles(raw string) (faults []string) {
	uri, err := amqp.ParseURI(raw)
	if err != nil || uri.Scheme != "amqps" {
		return nil
	}
	if uri.CACertFile != "" {
		pem, err := os.ReadFile(uri.CACertFile)
		switch {
		case err != nil:
			faults = append(faults, fmt.Sprintf("cacertfile: %v", err))
		case !x509.NewCertPool().AppendCertsFromPEM(pem):
			faults = append(faults, fmt.Sprintf("cacertfile: no certificate in PEM form in %s", uri.CACertFile))
		}
	}
	switch {
	case (uri.CertFile == "") != (uri.KeyFile == ""):
		faults = append(faults, "certfile and keyfile belong together, one is missing")
	case uri.CertFile != "":
		if _, err := tls.LoadX509KeyPair(uri.CertFile, uri.KeyFile); err != nil {
			faults = append(faults, fmt.Sprintf("certfile and keyfile: %v", err))
		}
	}
	return faults
}

// scrubAMQP says what amqp091-go disliked about a URL. Its own errors quote values.
func scrubAMQP(err error) string {
	for _, known := range []string{
		"heartbeat is not an uint16", "connection_timeout is not an integer",
		"channel_max is not an uint16", "must not contain whitespace",
	} {
		if strings.Contains(err.Error(), known) {
			return known
		}
	}
	return "not a URL that amqp091-go understands"
}

// RedactAMQP is what may be said of a URL: user, host and virtual host.
func RedactAMQP(raw string) string {
	if len(CheckAMQP(raw)) > 0 {
		return unreadable
	}
	uri, err := amqp.ParseURI(raw)
	if err != nil {
		return unreadable
	}
	return fmt.Sprintf("%s://%s@%s/%s", uri.Scheme, url.PathEscape(uri.Username),
		net.JoinHostPort(uri.Host, strconv.Itoa(uri.Port)), url.PathEscape(strings.TrimPrefix(uri.Vhost, "/")))
}
