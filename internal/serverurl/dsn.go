// Package serverurl checks the URLs of the two servers before anything is dialled, completes them, and
// says what may be shown of them. They hold passwords, and what the client libraries say of a faulty URL
// quotes it: no text that this package returns holds any part that could belong to a password.
//
// All functions may be called from several goroutines.
package serverurl

import (
	"fmt"
	"maps"
	"net"
	"net/netip"
	"net/url"
	"regexp"
	"slices"
	"strconv"
	"strings"

	"github.com/lib/pq"
)

// unreadable stands for a URL that cannot be taken apart, so that nothing of it can be shown.
const unreadable = "(unreadable)"

const (
	// connectTimeoutSeconds bounds a connect to PostgreSQL where the DSN does not. Without a bound
	// lib/pq waits for ever for a server that accepts and stays silent, and so does Listener.Close.
	connectTimeoutSeconds = 5

	// ApplicationName is how sessions are seen in pg_stat_activity unless the DSN says otherwise.
	ApplicationName = "outbox-relay"
)

// refusedParameters are those of libpq, pgx, JDBC and Prisma that lib/pq does not know. It would
// send them on as settings, for which the server refuses the connection.
var refusedParameters = []struct{ instead, names string }{
	{"leave it out, the relay sets its own limits", "keepalives keepalives_idle keepalives_interval " +
		"keepalives_count tcp_user_timeout tcpKeepAlive socketTimeout socket_timeout"},
	{"leave it out, the relay keeps its own few connections", "connection_limit pool_timeout pool_max_conns " +
		"pool_min_conns pool_min_idle_conns pool_max_conn_lifetime pool_max_conn_lifetime_jitter " +
		"pool_max_conn_idle_time pool_health_check_period"},
	{"leave it out", "channel_binding require_auth requirepeer gssencmode gssdelegation gsslib sslcompression " +
		"sslcertmode sslcrl sslcrldir sslkeylogfile replication default_query_exec_mode statement_cache_capacity " +
		"description_cache_capacity statement_cache_mode prefer_simple_protocol prepareThreshold loggerLevel"},
	{"use an unencrypted key file", "sslpassword"},
	{"use a password", "scram_client_key scram_server_key"},
	{"use sslmode", "requiressl ssl sslaccept sslfactory"},
	{"use search_path", "schema currentSchema"},
	{"use user", "username"},
	{"use connect_timeout, in seconds", "connectTimeout loginTimeout"},
	{"use application_name", "ApplicationName"},
	{"use target_session_attrs", "targetServerType"},
	{"name the server itself, locks mean nothing through a transaction pooler", "pgbouncer"},
}

// RefusedPGVariables make every connect of lib/pq fail when they are in the environment.
var RefusedPGVariables = []string{
	"PGREQUIRESSL", "PGSSLCOMPRESSION", "PGREALM", "PGGSSENCMODE", "PGGSSDELEGATION", "PGGSSLIB",
	"PGREQUIREAUTH", "PGCHANNELBINDING", "PGSSLCERTMODE", "PGSSLCRL", "PGSSLCRLDIR", "PGREQUIREPEER",
	"PGKRBSRVNAME", // because no Kerberos provider is linked in
}

var (
	anyURL      = regexp.MustCompile(`^[A-Za-z][A-Za-z0-9+.-]*://`)
	settingName = regexp.MustCompile(`^[A-Za-z_][A-Za-z0-9_.$]*$`) // of PostgreSQL
	postgresURL = regexp.MustCompile(`^postgres(ql)?://`)
)

// PrepareDSN gives a DSN a connect_timeout and an application_name where it has none, or returns
// all that is wrong with it, without any part that could belong to a password.
func PrepareDSN(raw string) (dsn string, faults []string) {
	if trimmed := strings.TrimSpace(raw); anyURL.MatchString(trimmed) {
		raw = trimmed // in key=value a space at the end may be escaped
	}
	var u *url.URL
	switch {
	case postgresURL.MatchString(raw):
		var fault string
		if u, fault = parseURL(raw); fault != "" {
			return "", []string{fault}
		}
		if strings.HasSuffix(u.Host, "]") { // lib/pq would keep the brackets
			return "", []string{"an IPv6 address needs its port, as in [::1]:5432"}
		}
	case anyURL.MatchString(raw):
		return "", []string{"the scheme must be postgres:// or postgresql://"}
	}

	cfg, err := pq.NewConfig(raw)
	if err != nil {
		return "", []string{ScrubPQ(err)}
	}
	for _, name := range slices.Sorted(maps.Keys(cfg.Runtime)) {
		if !settingName.MatchString(name) {
			return "", []string{"a parameter has a name that is none; as URL it must begin with postgres://"}
		}
		for _, refused := range refusedParameters {
			if slices.Contains(strings.Fields(refused.names), name) {
				faults = append(faults, fmt.Sprintf("parameter %s is not supported: %s", name, refused.instead))
			}
		}
	}
	if u != nil && strings.Count(u.Host, ":") > 1 && !strings.HasPrefix(u.Host, "[") {
		faults = append(faults, "ports of several hosts go into a parameter, as in postgres://host1,host2/db?port=5432,5433")
	}
	if len(faults) > 0 {
		return "", faults
	}

	missing := map[string]string{}
	if cfg.ConnectTimeout <= 0 {
		missing["connect_timeout"] = strconv.Itoa(connectTimeoutSeconds)
	}
	if cfg.ApplicationName == "" {
		missing["application_name"] = ApplicationName
	}
	if dsn = withParameters(raw, u, missing); !hasConnectTimeout(dsn) {
		return "", []string{"connect_timeout must be 1 or more seconds: 0 would wait for ever"}
	}
	return dsn, nil
}

// withParameters adds parameters to a DSN, which u is when it is a URL. Those it has already stay.
func withParameters(raw string, u *url.URL, add map[string]string) string {
	if u != nil {
		q := u.Query()
		for k, v := range add {
			if !q.Has(k) {
				q.Set(k, v)
			}
		}
		u.RawQuery = q.Encode()
		return u.String()
	}
	// In front, where later ones of the same name win; after an empty value at the end, they
	// would become that value.
	var b strings.Builder
	for _, k := range slices.Sorted(maps.Keys(add)) {
		b.WriteString(k + "=" + add[k] + " ")
	}
	return b.String() + raw
}

func hasConnectTimeout(dsn string) bool {
	cfg, err := pq.NewConfig(dsn)
	return err == nil && cfg.ConnectTimeout > 0
}

// pqSafe matches what lib/pq's errors say of a DSN without quoting its values: the name of a
// parameter or a variable, what it may be, counts.
var pqSafe = regexp.MustCompile(`wrong value for "[a-z_]+"|wrong value for \$[A-Z_]+|supported values are .*|` +
	`environment variable \$[A-Z_]+ is not supported.*|could not match \d+ .*|missing character after backslash|` +
	`unterminated quoted string literal|unsupported client_encoding|unsupported datestyle|` +
	`(min|max)_protocol_version|weak sslmode "[a-z-]+" may not be used.*|service file "[^"]*" not found|definition of service "[^"]*" not found`)

// ScrubPQ says what lib/pq disliked about a DSN. Its own errors quote values, and where a
// password is quoted wrongly any value may be a part of it.
func ScrubPQ(err error) string {
	text := err.Error()
	switch {
	case strings.HasPrefix(text, `missing "=" after`):
		return `a parameter has no "="; a value with spaces needs single quotes`
	case strings.HasPrefix(text, "user: "), strings.Contains(text, "current user"):
		return "no user is given, and the process has no name to take its place"
	}
	if safe := pqSafe.FindAllString(text, -1); len(safe) > 0 {
		return strings.Join(safe, "; ")
	}
	return "not a connection string that lib/pq understands"
}

// parseURL parses a URL, or says what is wrong with it without quoting any of it: a reserved
// character in a password moves parts of the password into every other place of a URL. What it
// lets pass holds the password only where it belongs.
func parseURL(raw string) (u *url.URL, fault string) {
	const encode = ": reserved characters in user name and password must be percent-encoded (@ as %40, / as %2F, ? as %3F, # as %23, % as %25)"
	u, err := url.Parse(raw)
	if err != nil {
		for _, known := range []string{
			"invalid port", "invalid URL escape", "invalid userinfo",
			"invalid control character", "invalid character", "missing ']' in host",
		} {
			if strings.Contains(err.Error(), known) {
				return nil, "not a URL (" + known + ")" + encode
			}
		}
		return nil, "not a URL" + encode
	}
	_, rest, _ := strings.Cut(raw, "://")
	if strings.Contains(raw, "#") {
		return nil, "has a # in it" + encode
	}
	if i := strings.IndexAny(rest, "/?"); i >= 0 && strings.Contains(rest[i:], "@") {
		return nil, "has an @ after the host" + encode
	}
	return u, ""
}

// RedactDSN is what may be said of a DSN: user, hosts and database.
func RedactDSN(raw string) string {
	if _, faults := PrepareDSN(raw); len(faults) > 0 {
		return unreadable
	}
	cfg, err := pq.NewConfig(raw)
	if err != nil {
		return unreadable
	}
	host := func(name string, addr netip.Addr, port uint16) string {
		if addr.IsValid() {
			name = addr.String()
		}
		return net.JoinHostPort(name, strconv.Itoa(int(port)))
	}
	hosts := []string{host(cfg.Host, cfg.Hostaddr, cfg.Port)}
	for _, m := range cfg.Multi {
		hosts = append(hosts, host(m.Host, m.Hostaddr, m.Port))
	}
	return fmt.Sprintf("postgres://%s@%s/%s", url.PathEscape(cfg.User), strings.Join(hosts, ","), url.PathEscape(cfg.Database))
}
