package serverurl

import (
	"strings"
	"testing"
	"time"

	"github.com/lib/pq"
)

func TestPrepareDSN(t *testing.T) {
	const standard = 5 * time.Second
	tests := []struct {
		name    string
		dsn     string
		timeout time.Duration
		app     string
		check   func(pq.Config) bool
	}{
		{"a URL", "postgres://u:p@h/d", standard, "outbox-relay", nil},
		{"white space around", " postgres://u:p@h/d\n", standard, "outbox-relay", nil},
		{"the other scheme", "postgresql://u:p@h/d", standard, "outbox-relay", nil},
		{"a URL that says all", "postgres://u:p@h/d?connect_timeout=2&application_name=me", 2 * time.Second, "me", nil},
		{"key=value", "user=u password=p host=h dbname=d", standard, "outbox-relay", nil},
		{"key=value that says all", "user=u password=p host=h dbname=d connect_timeout=9 application_name='a b'", 9 * time.Second, "a b", nil},
		{"key=value that ends in an empty value", "user=u host=h password=", standard, "outbox-relay", func(c pq.Config) bool { return c.Password == "" }},
		{"a fallback name of its own", "user=u fallback_application_name=mine", standard, "mine", nil},
		{"a schema", "postgres://u:p@h/d?search_path=shop", standard, "outbox-relay", func(c pq.Config) bool { return c.Runtime["search_path"] == "shop" }},
		{"a password with every reserved character", "postgres://u:%40%2F%3F%23%25%3A%20%27%5C@h/d", standard, "outbox-relay", func(c pq.Config) bool { return c.Password == `@/?#%: '\` }},
		{"an @ in the password as it is", "postgres://u:p@ss@h/d", standard, "outbox-relay", func(c pq.Config) bool { return c.Password == "p@ss" }},
		{"several hosts", "postgres://u:p@a,b/d?port=1,2&target_session_attrs=read-write", standard, "outbox-relay", func(c pq.Config) bool {
			return c.Host == "a" && c.Port == 1 && c.Multi[0].Host == "b" && c.Multi[0].Port == 2
		}},
		{"IPv6", "postgres://u:p@[::1]:5432/d", standard, "outbox-relay", func(c pq.Config) bool { return c.Host == "::1" }},
		{"a socket", "user=u host=/run/postgresql dbname=d", standard, "outbox-relay", func(c pq.Config) bool { return c.Host == "/run/postgresql" }},
		{"sslmode stays", "postgres://u:p@h/d?sslmode=disable", standard, "outbox-relay", func(c pq.Config) bool { return c.SSLMode == "disable" }},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			dsn, faults := PrepareDSN(tt.dsn)
			if len(faults) > 0 {
				t.Fatal(faults)
			}
			cfg, err := pq.NewConfig(dsn)
			if err != nil {
				t.Fatal(err)
			}
			if cfg.ConnectTimeout != tt.timeout {
				t.Errorf("connect_timeout = %v, want %v", cfg.ConnectTimeout, tt.timeout)
			}
			if cfg.ApplicationName != tt.app {
				t.Errorf("application_name = %q, want %q", cfg.ApplicationName, tt.app)
			}
			if cfg.User != "u" {
				t.Errorf("user = %q", cfg.User)
			}
			if tt.check != nil && !tt.check(cfg) {
				t.Errorf("%s became %s", tt.dsn, dsn)
			}
		})
	}
}

const encodeHint = ": reserved characters in user name and password must be percent-encoded (@ as %40, / as %2F, ? as %3F, # as %23, % as %25)"

// badDSNs holds what is wrong with a DSN, the password hunter2 in every place it may end up in.
var badDSNs = []struct{ name, dsn, want string }{
	{"another scheme", "mysql://u:hunter2@h/d", "the scheme must be postgres:// or postgresql://"},
	{"a dialect in the scheme", "postgresql+psycopg://u:hunter2@h/d", "the scheme must be postgres:// or postgresql://"},
	{"JDBC", "jdbc:postgresql://h/d?password=hunter2", `a parameter has a name that is none; as URL it must begin with postgres://`},
	{"no URL and no key", "hunter2", `a parameter has no "="; a value with spaces needs single quotes`},
	{"a password with a space", "user=u password=my hunter2 host=h", `a parameter has no "="; a value with spaces needs single quotes`},
	{"a quote not closed", "user=u password='hunter2", "unterminated quoted string literal"},
	{"/ in the password", "postgres://u:x/hunter2@h/d", "not a URL (invalid port)" + encodeHint},
	{"a number and / in the password", "postgres://u:12/hunter2@h/d", "has an @ after the host" + encodeHint},
	{"@ and / in the password", "postgres://u:p@x/hunter2@h/d", "has an @ after the host" + encodeHint},
	{"? in the password", "postgres://u:12?hunter2@h/d", "has an @ after the host" + encodeHint},
	{"# in the password", "postgres://u:12#hunter2@h/d", "has a # in it" + encodeHint},
	{"% in the password", "postgres://u:hunter2%zz@h/d", "not a URL (invalid URL escape)" + encodeHint},
	{"a space in the password", "postgres://u:hunter2 x@h/d", "not a URL (invalid userinfo)" + encodeHint},
	{"a line end in the password", "postgres://u:hunter2\n@h/d", "not a URL (invalid control character)" + encodeHint},
	{"a port that is none", "postgres://u:p@h:hunter2/d", "not a URL (invalid port)" + encodeHint},
	{"a port in key=value", "user=u port=hunter2", `wrong value for "port"`},
	{"sslmode", "postgres://u:hunter2@h/d?sslmode=hunter2", `wrong value for "sslmode"; supported values are `},
	{"connect_timeout with a unit", "postgres://u:hunter2@h/d?connect_timeout=5s", `wrong value for "connect_timeout"`},
	{"connect_timeout without end", "postgres://u:hunter2@h/d?connect_timeout=0", "connect_timeout must be 1 or more seconds: 0 would wait for ever"},
	{"connect_timeout without end, key=value", "user=u password=hunter2 connect_timeout=0", "connect_timeout must be 1 or more seconds: 0 would wait for ever"},
	{"libpq's channel_binding", "postgres://u:hunter2@h/d?channel_binding=require", "parameter channel_binding is not supported: leave it out"},
	{"pgx's pool", "postgres://u:hunter2@h/d?pool_max_conns=5", "parameter pool_max_conns is not supported: leave it out, the relay keeps its own few connections"},
	{"Prisma's schema", "postgres://u:hunter2@h/d?schema=shop", "parameter schema is not supported: use search_path"},
	{"keepalives", "user=u password=hunter2 keepalives_idle=5", "parameter keepalives_idle is not supported: leave it out, the relay sets its own limits"},
	{"ports beside several hosts", "postgres://u:hunter2@a:1,b:2/d", "ports of several hosts go into a parameter, as in postgres://host1,host2/db?port=5432,5433"},
	{"IPv6 without port", "postgres://u:hunter2@[::1]/d", "an IPv6 address needs its port, as in [::1]:5432"},
	{"more ports than hosts", "postgres://u:hunter2@a,b/d?port=1,2,3", "could not match 3 port numbers to 2 hosts"},
	{"an encoding", "user=u password=hunter2 client_encoding=latin1", "unsupported client_encoding"},
}

func TestPrepareDSNSaysWhatIsWrongAndNothingElse(t *testing.T) {
	for _, tt := range badDSNs {
		t.Run(tt.name, func(t *testing.T) {
			_, faults := PrepareDSN(tt.dsn)
			if len(faults) != 1 || !strings.HasPrefix(faults[0], tt.want) {
				t.Errorf("faults = %q, want %q", faults, tt.want)
			}
			if said := strings.Join(faults, "") + RedactDSN(tt.dsn); strings.Contains(said, "hunter2") {
				t.Errorf("a password in %s", said)
			}
		})
	}
}

func TestPrepareDSNFindsSeveralFaults(t *testing.T) {
	_, faults := PrepareDSN("postgres://u:p@h/d?channel_binding=require&schema=x&gssencmode=disable")
	if len(faults) != 3 {
		t.Errorf("faults = %q, want 3", faults)
	}
}

// TestRefusedPGVariablesAreThoseOfPQ fails when a new lib/pq takes what we refuse.
func TestRefusedPGVariablesAreThoseOfPQ(t *testing.T) {
	for _, name := range RefusedPGVariables {
		t.Run(name, func(t *testing.T) {
			t.Setenv(name, "x")
			if _, err := pq.NewConfig("user=u"); err == nil {
				t.Errorf("lib/pq takes $%s", name)
			}
		})
	}
}

func TestRedactedDSN(t *testing.T) {
	for dsn, want := range map[string]string{
		"postgres://u:hunter2@h/d":                            "postgres://u@h:5432/d",
		"postgres://u:hunter2@a,b/d?port=1,2":                 "postgres://u@a:1,b:2/d",
		"user=u password=hunter2 host=h port=5433 dbname='d'": "postgres://u@h:5433/d",
		"user=u hostaddr=10.0.0.1 dbname=d":                   "postgres://u@10.0.0.1:5432/d",
		"postgres://u@h/d?password=hunter2":                   "postgres://u@h:5432/d",
	} {
		if got := RedactDSN(dsn); got != want {
			t.Errorf("redacted(%s) = %s, want %s", dsn, got, want)
		}
	}
}

func FuzzPrepareDSN(f *testing.F) {
	for _, tt := range badDSNs {
		f.Add(tt.dsn)
	}
	f.Add("postgres://u:p@h/d?sslmode=disable")
	f.Add("user=u password='a b' host=h")
	f.Fuzz(func(t *testing.T, raw string) {
		dsn, faults := PrepareDSN(raw)
		if len(faults) > 0 {
			return
		}
		if trimmed := strings.TrimSpace(raw); anyURL.MatchString(trimmed) {
			raw = trimmed
		}
		was, err := pq.NewConfig(raw)
		if err != nil {
			t.Fatalf("%q passed: %v", raw, err)
		}
		is, err := pq.NewConfig(dsn)
		if err != nil {
			t.Fatalf("%q became %q: %v", raw, dsn, err)
		}
		if is.ConnectTimeout <= 0 || is.Password != was.Password || is.User != was.User || is.Host != was.Host ||
			is.Port != was.Port || is.Database != was.Database || is.SSLMode != was.SSLMode {
			t.Errorf("%q became %q", raw, dsn)
		}
		again, faults := PrepareDSN(dsn)
		if len(faults) > 0 || again != dsn {
			t.Errorf("%q became %q, then %q %v", raw, dsn, again, faults)
		}
	})
}
