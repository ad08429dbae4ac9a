package main

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"outbox-relay/internal/serverurl"

	"github.com/google/go-cmp/cmp"
)

// validEnviron is the least that a relay needs.
var validEnviron = []string{
	"DATABASE_URL=postgres://app:hunter2@db.example/orders",
	"AMQP_URL=amqp://app:hunter2@mq.example/orders",
}

func noEnv(string) (string, bool) { return "", false }

// validConfig is validEnviron read, with every default.
func validConfig(t testing.TB) Config {
	t.Helper()
	_, cfg, faults, err := parseConfig(nil, validEnviron, io.Discard)
	if err != nil || len(faults) > 0 {
		t.Fatal(err, faults)
	}
	return cfg
}

// faultsOf returns the faults of an error as "SETTING: text".
func faultsOf(t testing.TB, err error) (texts []string) {
	t.Helper()
	if err == nil {
		return nil
	}
	var all configError
	if !errors.As(err, &all) {
		t.Fatalf("%T: %v", err, err)
	}
	for _, f := range all {
		texts = append(texts, f.setting+": "+f.text)
	}
	return texts
}

func TestValidate(t *testing.T) {
	dir := t.TempDir()
	write := func(name, text string) string {
		file := filepath.Join(dir, name)
		if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		return file
	}
	good, empty := write("good", "postgres://app:hunter2@db/orders\n"), write("empty", "\n")
	goodAMQP, twoLines := write("amqp", "amqp://app:hunter2@mq\n"), write("two", "a\nb\n")
	web := write("web", "basic_auth_users: hunter2\n")

	tests := []struct {
		name   string
		mutate func(*Config)
		want   []string
	}{
		{"the least is enough", func(*Config) {}, nil},
		{"no database", func(c *Config) { c.DatabaseURL = "" }, []string{"DATABASE_URL: not set; set it, or DATABASE_URL_FILE to a file that holds it"}},
		{"no broker", func(c *Config) { c.AMQPURL = "" }, []string{"AMQP_URL: not set; set it, or AMQP_URL_FILE to a file that holds it"}},
		{"secrets from files", func(c *Config) {
			c.DatabaseURL, c.DatabaseURLFile, c.AMQPURL, c.AMQPURLFile = "", good, "", goodAMQP
		}, nil},
		{"a secret both ways", func(c *Config) { c.DatabaseURLFile = good }, []string{"DATABASE_URL_FILE: set together with DATABASE_URL: set one of the two"}},
		{"an absent file", func(c *Config) { c.AMQPURL, c.AMQPURLFile = "", "/nonexistent/amqp" }, []string{"AMQP_URL_FILE: open /nonexistent/amqp: no such file or directory"}},
		{"an empty file", func(c *Config) { c.DatabaseURL, c.DatabaseURLFile = "", empty }, []string{"DATABASE_URL_FILE: " + empty + ": empty"}},
		{"a file of two lines", func(c *Config) { c.AMQPURL, c.AMQPURLFile = "", twoLines }, []string{"AMQP_URL_FILE: " + twoLines + ": more than one line"}},
		{"a directory", func(c *Config) { c.AMQPURL, c.AMQPURLFile = "", dir }, []string{"AMQP_URL_FILE: read " + dir + ": is a directory"}},

		{"the default exchange", func(c *Config) { c.AMQPExchange = "" }, nil},
		{"a templated exchange", func(c *Config) { c.AMQPExchange = "{aggregate_type}" }, nil},
		{"a plugin's exchange type", func(c *Config) { c.AMQPExchangeType = "x-consistent-hash" }, nil},
		{"an exchange type that is none", func(c *Config) { c.AMQPExchangeType = "Topic" }, []string{`AMQP_EXCHANGE_TYPE: "Topic" is not topic, direct, fanout, headers or a plugin's type that begins with x-`}},
		{"a template with a slip", func(c *Config) { c.AMQPRoutingKey = "{event}" }, []string{`AMQP_ROUTING_KEY: template "{event}": unknown placeholder {event}; ` + templateHelp}},
		{"messages over a batch", func(c *Config) { c.AMQPMaxMessageBytes, c.BatchBytes = 32<<20, 16<<20 }, nil},

		{"not an order", func(c *Config) { c.Ordering = "total" }, []string{`ORDERING: "total" is not one of aggregate, none`}},
		{"an empty order", func(c *Config) { c.Ordering = "" }, []string{`ORDERING: "" is not one of aggregate, none`}},
		{"a window without order", func(c *Config) { c.Ordering, c.AggregateWindow = "none", 2 }, []string{"AGGREGATE_WINDOW: 2 has no meaning with ORDERING=none, which puts no limit on an aggregate: leave it at 1"}},
		{"hold without order", func(c *Config) { c.Ordering, c.OnDeadLetter = "none", "hold" }, []string{"ON_DEAD_LETTER: hold has no meaning with ORDERING=none, where no event waits for another"}},
		{"the smallest batch", func(c *Config) { c.BatchSize, c.BatchBytes = 1, 1 }, nil},
		{"no batch", func(c *Config) { c.BatchSize = 0 }, []string{"BATCH_SIZE: 0 is not from 1 to 100000"}},
		{"a negative wait", func(c *Config) { c.RetryBase = -time.Second }, []string{"RETRY_BASE: -1s is not from 1ms to 24h"}},
		{"polling too often", func(c *Config) { c.FallbackInterval = time.Microsecond }, []string{"FALLBACK_INTERVAL: 1µs is not from 100ms to 1h"}},
		{"retries that start above their limit", func(c *Config) { c.RetryBase = time.Hour }, []string{"RETRY_BASE: 1h0m0s is over RETRY_MAX (5m0s)"}},
		{"a confirm that outlasts the shutdown", func(c *Config) { c.ConfirmTimeout = 8 * time.Second }, []string{"CONFIRM_TIMEOUT: 8s is not below SHUTDOWN_TIMEOUT (8s): a shutdown could not wait for a confirm, and the event would be sent twice"}},
		{"a limit out of bounds is no conflict as well", func(c *Config) { c.RetryMax = 0 }, []string{"RETRY_MAX: 0s is not from 1ms to 168h"}},

		{"events deleted at once", func(c *Config) { c.Retention = "immediate" }, nil},
		{"events kept for a week", func(c *Config) { c.Retention = "168h" }, nil},
		{"the shortest retention", func(c *Config) { c.Retention = "1s" }, nil},
		{"the longest retention", func(c *Config) { c.Retention = "87600h" }, nil},
		{"no retention", func(c *Config) { c.Retention = "0" }, []string{`RETENTION: "0" could mean two things: set immediate to delete events instead of marking them processed, off to keep them`}},
		{"no retention, with a unit", func(c *Config) { c.Retention = "0s" }, []string{`RETENTION: "0s" could mean two things: set immediate to delete events instead of marking them processed, off to keep them`}},
		{"a negative retention", func(c *Config) { c.Retention = "-24h" }, []string{`RETENTION: "-24h" is not from 1s to 87600h`}},
		{"too short a retention", func(c *Config) { c.Retention = "1ms" }, []string{`RETENTION: "1ms" is not from 1s to 87600h`}},
		{"too long a retention", func(c *Config) { c.Retention = "87601h" }, []string{`RETENTION: "87601h" is not from 1s to 87600h`}},
		{"a retention in days", func(c *Config) { c.Retention = "7d" }, []string{`RETENTION: "7d" is not off, immediate or a duration like 168h`}},
		{"an empty retention", func(c *Config) { c.Retention = "" }, []string{`RETENTION: "" is not off, immediate or a duration like 168h`}},

		{"an address without port", func(c *Config) { c.HTTPAddr = "localhost" }, []string{`HTTP_ADDR: "localhost" is not an address like :9090 or 127.0.0.1:9090`}},
		{"a port too far", func(c *Config) { c.HTTPAddr = ":65536" }, []string{`HTTP_ADDR: ":65536" is not an address like :9090 or 127.0.0.1:9090`}},
		{"an absent web configuration", func(c *Config) { c.WebConfigFile = "/nonexistent/web" }, []string{"WEB_CONFIG_FILE: open /nonexistent/web: no such file or directory"}},
		{"a web configuration with a slip", func(c *Config) { c.WebConfigFile = web }, []string{
			"WEB_CONFIG_FILE: yaml: unmarshal errors: line 1: cannot unmarshal !!str `...` into map[string]config.Secret",
		}},
		{"not a level", func(c *Config) { c.LogLevel = "trace" }, []string{`LOG_LEVEL: "trace" is not one of debug, info, warn, error`}},
		{"not a format", func(c *Config) { c.LogFormat = "xml" }, []string{`LOG_FORMAT: "xml" is not one of json, text`}},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			cfg := validConfig(t)
			tt.mutate(&cfg)
			if diff := cmp.Diff(tt.want, faultsOf(t, cfg.validate(&runCommand{}, nil, noEnv))); diff != "" {
				t.Error(diff)
			}
		})
	}
}

// A secret that is given as a flag, as value or as file, wins over both of its variables.
func TestASecretAsFlagWinsOverBothItsVariables(t *testing.T) {
	for _, tt := range []struct {
		arg, variable string
		value, file   string // of DATABASE_URL
	}{
		{"--database-url=a", "DATABASE_URL_FILE=b", "a", ""},
		{"--database-url-file=a", "DATABASE_URL=b", "", "a"},
		{"--database-url=a", "DATABASE_URL=b", "a", ""},
		{"--batch-size=1", "DATABASE_URL_FILE=b", "", "b"},
	} {
		_, cfg, faults, err := parseConfig([]string{tt.arg}, []string{tt.variable, "AMQP_URL_FILE=c"}, io.Discard)
		if err != nil || len(faults) > 0 || cfg.DatabaseURL != tt.value || cfg.DatabaseURLFile != tt.file || cfg.AMQPURLFile != "c" {
			t.Errorf("%s, %s: %q and file %q, %v %v", tt.arg, tt.variable, cfg.DatabaseURL, cfg.DatabaseURLFile, faults, err)
		}
	}
}

func TestEveryFaultIsReportedAtOnce(t *testing.T) {
	environ := []string{
		"RETRY_BASE=5", "BATCH_SIZE=many", "AMQP_DECLARE=maybe", "ORDERING=x", "MAX_ATTEMPTS=0", "PGCHANNELBINDING=require",
		"DATABASE_URL=mysql://app:hunter2@db", "AMQP_URL=http://b:hunter2@mq",
	}
	args := []string{"--retry-max=soon", "--http-addr=9090", "--amqp-mandatory=perhaps"}
	command, cfg, faults, err := parseConfig(args, environ, io.Discard)
	if err != nil {
		t.Fatal(err)
	}
	got := faultsOf(t, cfg.validate(command, faults, lookup(environ)))
	want := []string{
		"DATABASE_URL: the scheme must be postgres:// or postgresql://",
		"AMQP_URL: the scheme must be amqp:// or amqps://",
		`AMQP_DECLARE: "maybe" is not true or false`,
		`AMQP_MANDATORY: "perhaps" is not true or false`,
		`ORDERING: "x" is not one of aggregate, none`,
		`BATCH_SIZE: "many" is not a whole number`,
		"MAX_ATTEMPTS: 0 is not from 1 to 1000000",
		`RETRY_BASE: "5" is not a duration like 500ms, 5s or 1m30s`,
		`RETRY_MAX: "soon" is not a duration like 500ms, 5s or 1m30s`,
		`HTTP_ADDR: "9090" is not an address like :9090 or 127.0.0.1:9090`,
		"PGCHANNELBINDING: not supported, every connect would fail: unset it",
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Error(diff)
	}
}

func TestAPGVariableThatBlocksIsAFault(t *testing.T) {
	for _, name := range serverurl.RefusedPGVariables {
		t.Setenv(name, "x")
		environ := append(slices.Clone(validEnviron), name+"=x")
		got := faultsOf(t, validConfig(t).validate(&runCommand{}, nil, lookup(environ)))
		if len(got) != 1 || !strings.HasPrefix(got[0], name+": ") {
			t.Errorf("faults = %q, want one of %s", got, name)
		}
		if err := os.Unsetenv(name); err != nil {
			t.Fatal(err)
		}
	}
}

func TestFlagsWinAndEmptyVariablesAreUnset(t *testing.T) {
	environ := append(slices.Clone(validEnviron), "RETRY_BASE=2s", "RETRY_MAX=", "ORDERING=", "BATCH_SIZE=7",
		"AMQP_EXCHANGE=", "AMQP_DECLARE=false", "AMQP_MANDATORY=no")
	_, cfg, faults, err := parseConfig([]string{"--batch-size", "9", "--amqp-mandatory"}, environ, io.Discard)
	if err != nil || len(faults) > 0 {
		t.Fatal(err, faults)
	}
	want := validConfig(t)
	want.RetryBase, want.BatchSize, want.AMQPExchange, want.AMQPDeclare = 2*time.Second, 9, "", false
	if diff := cmp.Diff(want.settingsMap(), cfg.settingsMap()); diff != "" {
		t.Error(diff)
	}
}

// settingsMap shows a Config to cmp, which must not use its String.
func (c Config) settingsMap() map[string]any {
	m := make(map[string]any)
	for _, s := range c.settings() {
		m[s.name] = s.value.Interface()
	}
	return m
}

func TestTheEnvironmentOfTheProcessIsNotRead(t *testing.T) {
	t.Setenv("BATCH_SIZE", "7")
	if got := validConfig(t).BatchSize; got != 1000 {
		t.Errorf("BatchSize = %d, want the default", got)
	}
}

func TestCommandsNeedOnlyTheirSettings(t *testing.T) {
	tests := []struct {
		command string
		want    []string
	}{
		{"run", []string{"DATABASE_URL", "AMQP_URL", "HTTP_ADDR", "LOG_LEVEL"}},
		{"migrate", []string{"DATABASE_URL"}},
		{"dead-letters list", []string{"DATABASE_URL"}},
		{"replay --all", []string{"DATABASE_URL", "AMQP_URL"}},
		{"replay --rate=0 --after=-1", []string{"DATABASE_URL", "AMQP_URL", "--rate", "--after", "--all"}},
		{"dead-letters retry --all", []string{"DATABASE_URL"}},
		{"dead-letters list --since=1h --until=2h", []string{"DATABASE_URL", "--until"}},
		{"dead-letters retry --since=2026-01-31T14:00:00Z --until=2026-01-31T14:00:00Z", []string{"DATABASE_URL", "--until"}},
		{"dead-letters list --since=2h --until=1h", []string{"DATABASE_URL"}},
		{"status --interval=9s", []string{"DATABASE_URL", "--interval"}},
		{"status --watch --interval=1", []string{"DATABASE_URL", "--interval"}},
		{"status --watch --interval=0s", []string{"DATABASE_URL", "--interval"}},
		{"status --watch --interval=9s", []string{"DATABASE_URL"}},
		{"dead-letters discard --rate=0 7", []string{"DATABASE_URL", "<id>", "--rate"}},
		{"healthcheck", []string{"HTTP_ADDR"}},
		{"version", nil},
	}
	for _, tt := range tests {
		t.Run(tt.command, func(t *testing.T) {
			command, cfg, faults, err := parseConfig(strings.Fields(tt.command), []string{"HTTP_ADDR=x", "LOG_LEVEL=x"}, io.Discard)
			if err != nil {
				t.Fatal(err)
			}
			var got []string
			for _, f := range faultsOf(t, cfg.validate(command, faults, noEnv)) {
				name, _, _ := strings.Cut(f, ":")
				got = append(got, name)
			}
			if diff := cmp.Diff(tt.want, got); diff != "" {
				t.Error(diff)
			}
		})
	}
}

func TestHelpOfACommandShowsOnlyItsSettings(t *testing.T) {
	for _, command := range []string{"migrate", "dead-letters"} {
		var help strings.Builder
		if _, _, _, err := parseConfig([]string{command, "-h"}, nil, &help); err != nil {
			t.Fatal(err)
		}
		if text := help.String(); !strings.Contains(text, "--database-url-file") || strings.Contains(text, "--amqp-url") {
			t.Error(text)
		}
	}
}

func TestUsageErrorsQuoteNoArgument(t *testing.T) {
	for _, args := range [][]string{
		{"postgres://app:hunter2@db"},
		{"--database-ur=postgres://app:hunter2@db"},
		{"--database-url", "host=db", "password=hunter2"},
		{"--database-url", "--amqp-url=amqp://app:hunter2@mq"},
		{"--postgres://app:hunter2@db"},
		{"-hunter2"},
		{"run", "hunter2"},
		{"version=hunter2"},
	} {
		_, _, _, err := parseConfig(args, nil, io.Discard)
		if err == nil {
			t.Errorf("%q: no error", args)
		} else if strings.Contains(err.Error(), "hunter2") {
			t.Errorf("%q: %v", args, err)
		}
	}
}

func TestAConfigIsNeverPrintedWithItsSecrets(t *testing.T) {
	cfg := validConfig(t)
	cfg.AMQPURL += ",amqps://other:hunter2@mq2.example:5671/v"
	var b bytes.Buffer
	slog.New(slog.NewJSONHandler(&b, nil)).Info("starting", "config", cfg)
	fmt.Fprintf(&b, "%v %+v %#v %s", cfg, cfg, cfg, cfg)
	if strings.Contains(b.String(), "hunter2") {
		t.Errorf("a password in %s", &b)
	}
	for _, want := range []string{
		`"database_url":"postgres://app@db.example:5432/orders"`,
		`"amqp_url":"amqp://app@mq.example:5672/orders,amqps://other@mq2.example:5671/v"`,
		`"ordering":"aggregate"`,
	} {
		if !strings.Contains(b.String(), want) {
			t.Errorf("no %s in %s", want, &b)
		}
	}
}

func TestUnknownVariables(t *testing.T) {
	tests := []struct{ variable, want string }{
		{"AMQP_EXCHANGES", "unknown variable AMQP_EXCHANGES: did you mean AMQP_EXCHANGE?"},
		{"DATABSE_URL", "unknown variable DATABSE_URL: did you mean DATABASE_URL?"},
		{"DATABASE_URI", "unknown variable DATABASE_URI: did you mean DATABASE_URL?"},
		{"LOGLEVEL", "unknown variable LOGLEVEL: did you mean LOG_LEVEL?"},
		{"amqp_url", "unknown variable amqp_url: did you mean AMQP_URL?"},
		{"OUTBOX_RELAY_BATCH_SIZE", "unknown variable OUTBOX_RELAY_BATCH_SIZE: did you mean BATCH_SIZE?"},
		{"ORDERNIG", "unknown variable ORDERNIG: did you mean ORDERING?"},
		{"RETENTION_DAYS", "unknown variable RETENTION_DAYS: there is no such setting"},
		{"AMQP_PASSWORD", "unknown variable AMQP_PASSWORD: there is no such setting"},
		{"AMQP_URL", ""},
		{"AMQP_SERVICE_HOST", ""},
		{"AMQP_PORT_5672_TCP_ADDR", ""},
		{"AMQP_PORT", ""},
		{"OUTBOX_RELAY_SERVICE_PORT", ""},
		{"TEST_DATABASE_URL", ""},
		{"PATH", ""},
		{"HOME", ""},
		{"HTTP_PROXY", ""},
		{"PGUSER", ""},
		{"LOGNAME", ""},
		{"RABBITMQ_URL", ""},
	}
	for _, tt := range tests {
		var want []string
		if tt.want != "" {
			want = []string{tt.want}
		}
		if diff := cmp.Diff(want, unknownVariables([]string{tt.variable + "=x"})); diff != "" {
			t.Errorf("%s: %s", tt.variable, diff)
		}
	}
}

// TestReadmeShowsEverySetting compares README's table of settings with the real ones, both ways.
func TestReadmeShowsEverySetting(t *testing.T) {
	var want, got []string
	for _, s := range (Config{}).settings() {
		standard := ""
		if d := s.tag.Get("default"); d != "" {
			standard = "`" + d + "`"
		}
		want = append(want, strings.Join(strings.Fields(fmt.Sprintf("| `%s` | %s | %s |", s.name, standard, helpOf(s.tag.Get))), " "))
	}
	readme, err := os.ReadFile("README.md")
	if err != nil {
		t.Fatal(err)
	}
	_, section, ok := strings.Cut(string(readme), "\n## Configuration\n")
	if !ok {
		t.Fatal("README.md has no section Configuration")
	}
	section, _, _ = strings.Cut(section, "\n## ")
	for line := range strings.Lines(section) {
		if strings.HasPrefix(line, "| `") {
			got = append(got, strings.TrimSpace(line))
		}
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("README.md differs (-settings +README):\n%s\nall rows:\n%s", diff, strings.Join(want, "\n"))
	}
}

// TestFlagsAreNamedLikeTheirVariables holds what README says of flags.
func TestFlagsAreNamedLikeTheirVariables(t *testing.T) {
	for _, s := range (Config{}).settings() {
		want := strings.ReplaceAll(strings.ToLower(s.name), "_", "-")
		if s.name == "WEB_CONFIG_FILE" {
			want = "web.config.file" // as every Prometheus exporter has it
		}
		if got := s.tag.Get("name"); got != want {
			t.Errorf("%s: flag %s, want %s", s.name, got, want)
		}
	}
}

func FuzzParseConfig(f *testing.F) {
	f.Add("RETRY_BASE", "5s", "--batch-size=3")
	f.Add("RETENTION", "0", "--retention=-1h")
	f.Add("DATABASE_URL", "postgres://a:b@c/d?sslmode=disable", "-h")
	f.Add("AMQP_URL", "amqp://a:b@c,amqps://d/%2f?heartbeat=5", "migrate")
	f.Add("BATCH_SIZE", "99999999999999999999", "--no-amqp-declare=no")
	f.Add("AMQP_ROUTING_KEY", "{header.x}", "--database-url")
	f.Fuzz(func(t *testing.T, name, value, arg string) {
		environ := append(slices.Clone(validEnviron), name+"="+value)
		command, cfg, faults, err := parseConfig([]string{arg}, environ, io.Discard)
		if err != nil {
			return
		}
		if command == nil {
			return
		}
		err = cfg.validate(command, faults, noEnv)
		_ = fmt.Sprint(err, cfg)
		if _, ok := command.(*runCommand); !ok || err != nil {
			return
		}
		// What has passed can be used.
		if _, err := cfg.databaseDSN(); err != nil {
			t.Error(err)
		}
		if _, err := cfg.amqpURLs(); err != nil {
			t.Error(err)
		}
		if _, err := newMessageMapper(cfg); err != nil {
			t.Error(err)
		}
		if _, err := cfg.keep(); err != nil {
			t.Error(err)
		}
		if cfg.RetryBase <= 0 || cfg.RetryMax < cfg.RetryBase || cfg.BatchSize < 1 || cfg.ConfirmTimeout >= cfg.ShutdownTimeout {
			t.Error(cfg)
		}
	})
}
