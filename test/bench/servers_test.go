package bench

import (
	"fmt"
	"net/url"
	"os"
	"os/exec"
	"runtime"
	"slices"
	"strings"
	"testing"
	"time"

	amqp "github.com/rabbitmq/amqp091-go"

	"outbox-relay/internal/testenv"
)

// servers are what is measured with.
type servers struct {
	postgres *testenv.Postgres // nil where the user's own is used
	database string            // what the two are, for the report
	broker   string
}

// provide starts the servers that are not given. Unlike in tests PostgreSQL keeps its data safe, as it
// does in production: a commit waits for the disk.
func provide(t *testing.T) *servers {
	t.Helper()
	s := new(servers)
	const lifetime = 6 * time.Hour
	if os.Getenv("TEST_DATABASE_URL") == "" {
		args := []string{
			"-c", "fsync=on", "-c", "full_page_writes=on", "-c", "shared_buffers=512MB",
			// No checkpoint may fall into one of two measurements that are compared.
			"-c", "max_wal_size=8GB", "-c", "checkpoint_timeout=1h",
		}
		for _, p := range parameters {
			args = append(args, "-c", p)
		}
		s.postgres = testenv.OwnPostgres(t, testenv.Options{Lifetime: lifetime, Args: args})
		t.Setenv("TEST_DATABASE_URL", withHost(t, s.postgres.DSN, s.postgres.Direct("5432/tcp")))
	}
	if os.Getenv("TEST_AMQP_URL") == "" {
		mq := testenv.OwnRabbitMQ(t, testenv.Options{Lifetime: lifetime})
		u, err := url.Parse(mq.URL)
		if err != nil {
			t.Fatal(err)
		}
		api := url.URL{Scheme: "http", User: u.User, Host: mq.Addr("15672/tcp")}
		t.Setenv("TEST_AMQP_URL", withHost(t, mq.URL, mq.Direct("5672/tcp")))
		t.Setenv("TEST_RABBITMQ_API_URL", api.String())
	}
	dsn := os.Getenv("TEST_DATABASE_URL")
	s.database = fmt.Sprintf("PostgreSQL %s, fsync %s, synchronous_commit %s",
		testenv.Value[string](t, dsn, "SHOW server_version"), testenv.Value[string](t, dsn, "SHOW fsync"),
		testenv.Value[string](t, dsn, "SHOW synchronous_commit"))
	conn := dial(t, os.Getenv("TEST_AMQP_URL"))
	s.broker = fmt.Sprintf("%v %v", conn.Properties["product"], conn.Properties["version"])
	return s
}

// withHost puts host:port into a URL: the servers are reached without Docker's proxy, which would take its
// part of the processors and of every round trip.
func withHost(t *testing.T, raw, host string) string {
	t.Helper()
	u, err := url.Parse(raw)
	if err != nil {
		t.Fatal(err)
	}
	u.Host = host
	return u.String()
}

// describe prints what the figures depend on.
func describe(t *testing.T, s *servers) {
	t.Helper()
	_, version, _ := testenv.Command(t, nil, "version")
	commit, _ := exec.Command("git", "describe", "--always", "--dirty").Output()
	kernel, _ := exec.Command("uname", "-sr").Output()
	for _, line := range [][2]string{
		{"machine", fmt.Sprintf("%d processors, %s, %s", runtime.NumCPU(), processor(), strings.TrimSpace(string(kernel)))},
		{"load", "average " + loadAverage() + " at the start"},
		{"servers", s.database + "; " + s.broker},
		{"relay", strings.TrimSpace(version)},
		{"sources", strings.TrimSpace(string(commit))},
		{"settings", settings.String()},
		{"flags", strings.Join(slices.DeleteFunc(slices.Clone(os.Args[1:]), func(arg string) bool {
			return strings.HasPrefix(arg, "-test.")
		}), " ")},
	} {
		if line[1] != "" {
			fmt.Printf("%-9s %s\n", line[0], line[1])
		}
	}
	fmt.Println()
}

func processor() string {
	text, _ := os.ReadFile("/proc/cpuinfo")
	for line := range strings.Lines(string(text)) {
		if name, ok := strings.CutPrefix(line, "model name"); ok {
			return strings.Trim(name, "\t :\n")
		}
	}
	return runtime.GOARCH
}

func loadAverage() string {
	text, err := os.ReadFile("/proc/loadavg")
	if err != nil {
		return "unknown"
	}
	return strings.Join(strings.Fields(string(text))[:3], " ")
}

// outbox is a migrated database and a vhost, new for each measurement: what an earlier one left behind,
// a queue that is still bound say, would slow down the next.
type outbox struct{ dsn, amqpURL string }

func newOutbox(t *testing.T) outbox {
	t.Helper()
	o := outbox{dsn: testenv.Database(t), amqpURL: testenv.Vhost(t)}
	o.migrate(t)
	return o
}

func (o outbox) migrate(t *testing.T) {
	t.Helper()
	code, stdout, stderr := testenv.Command(t, []string{"DATABASE_URL=" + o.dsn}, "migrate")
	if code != 0 {
		t.Fatalf("migrate: exit code %d\n%s%s", code, stdout, stderr)
	}
}

// settled waits until none of our events is pending any more.
func (o outbox) settled(t *testing.T) {
	t.Helper()
	testenv.Eventually(t, time.Minute, "all events are marked", func() bool {
		return !testenv.Value[bool](t, o.dsn, `SELECT EXISTS (SELECT FROM outbox_events
			WHERE processed_at IS NULL AND dead_at IS NULL AND retry_after IS NULL AND aggregate_type = $1)`, aggregateType)
	})
}

// transactions returns how many there were in the database so far. It asks from outside.
func (o outbox) transactions(t *testing.T) float64 {
	t.Helper()
	u, err := url.Parse(o.dsn)
	if err != nil {
		t.Fatal(err)
	}
	return testenv.Value[float64](t, os.Getenv("TEST_DATABASE_URL"),
		`SELECT (xact_commit + xact_rollback)::float8 FROM pg_stat_database WHERE datname = $1`, u.Path[1:])
}

// exchange is where everything is published.
const exchange = "outbox"

// dial connects to the broker until the measurement's end.
func dial(t *testing.T, amqpURL string) *amqp.Connection {
	t.Helper()
	conn, err := amqp.DialConfig(amqpURL, amqp.Config{Dial: amqp.DefaultDial(5 * time.Second)})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = conn.CloseDeadline(time.Now().Add(5 * time.Second)) })
	return conn
}

func channel(t *testing.T, conn *amqp.Connection) *amqp.Channel {
	t.Helper()
	ch, err := conn.Channel()
	if err != nil {
		t.Fatal(err)
	}
	if err := ch.ExchangeDeclare(exchange, amqp.ExchangeTopic, true, false, false, false, nil); err != nil {
		t.Fatal(err)
	}
	return ch
}
