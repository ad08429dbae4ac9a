// Package test breaks the built relay and the servers it works with, and looks from outside at
// what reaches the queues.
package test

import (
	"database/sql"
	"fmt"
	"os"
	"strconv"
	"strings"
	"testing"
	"time"

	amqp "github.com/rabbitmq/amqp091-go"

	"outbox-relay/internal/testenv"
)

func TestMain(m *testing.M) { testenv.Main(m) }

// patience bounds waits for what should come at once. It only decides how long a test that has
// failed takes to say so, and must hold on a busy machine under the race detector.
const patience = 30 * time.Second

// exchange is the default of AMQP_EXCHANGE.
const exchange = "outbox"

// outbox is a migrated database and a broker: what a relay works between.
type outbox struct {
	dsn, amqpURL string
	db           *sql.DB // an application's
}

// newOutbox makes an outbox on the servers that tests share.
func newOutbox(t *testing.T) *outbox {
	t.Helper()
	return outboxOn(t, testenv.Database(t), testenv.Vhost(t))
}

// outboxOn migrates the database at dsn.
func outboxOn(t *testing.T, dsn, amqpURL string) *outbox {
	t.Helper()
	migrate(t, dsn)
	return &outbox{dsn: dsn, amqpURL: amqpURL, db: testenv.DB(t, dsn)}
}

func migrate(t *testing.T, dsn string) (said string) {
	t.Helper()
	code, stdout, stderr := testenv.Command(t, []string{"DATABASE_URL=" + dsn}, "migrate")
	if code != 0 {
		t.Fatalf("migrate: exit code %d\n%s%s", code, stdout, stderr)
	}
	return stdout
}

// start runs a relay with these NAME=value settings besides the addresses of the servers.
func (o *outbox) start(t *testing.T, env ...string) *testenv.Process {
	t.Helper()
	return testenv.Start(t, append([]string{"DATABASE_URL=" + o.dsn, "AMQP_URL=" + o.amqpURL}, env...)...)
}

// event is a row as an application writes it; the zero value gets defaults.
type event struct {
	aggregate string // "1" by default
	eventType string // "order.created" by default
	payload   string // {} by default
	headers   string // NULL by default
}

// insert commits events in one transaction and returns their ids.
func (o *outbox) insert(t *testing.T, events ...event) []string {
	t.Helper()
	tx, err := o.db.BeginTx(t.Context(), nil)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = tx.Rollback() }()
	ids := make([]string, len(events))
	for i, e := range events {
		err := tx.QueryRowContext(t.Context(),
			`INSERT INTO outbox_events (aggregate_type, aggregate_id, event_type, payload, headers)
			 VALUES ('order', coalesce(nullif($1, ''), '1'), coalesce(nullif($2, ''), 'order.created'),
			         coalesce(nullif($3, ''), '{}')::jsonb, nullif($4, '')::jsonb)
			 RETURNING id`, e.aggregate, e.eventType, e.payload, e.headers).Scan(&ids[i])
		if err != nil {
			t.Fatal(err)
		}
	}
	if err := tx.Commit(); err != nil {
		t.Fatal(err)
	}
	return ids
}

// insertMany commits n events of one type in one transaction, spread over that many aggregates.
func (o *outbox) insertMany(t *testing.T, n, aggregates int, eventType string) {
	t.Helper()
	_, err := o.db.ExecContext(t.Context(),
		`INSERT INTO outbox_events (aggregate_type, aggregate_id, event_type, payload)
		 SELECT 'order', $3::text || (i % $2::int), $3, jsonb_build_object('i', i) FROM generate_series(1, $1::int) i`,
		n, aggregates, eventType)
	if err != nil {
		t.Fatal(err)
	}
}

// row is what the relay noted about an event.
type row struct {
	attempts              int
	lastError             string
	processed, dead, wait bool // processed_at, dead_at, retry_after are set
}

// row returns an event's row as it is now.
func (o *outbox) row(t *testing.T, id string) row {
	t.Helper()
	var r row
	err := o.db.QueryRowContext(t.Context(),
		`SELECT attempts, coalesce(last_error, ''), processed_at IS NOT NULL, dead_at IS NOT NULL, retry_after IS NOT NULL
		 FROM outbox_events WHERE id = $1`, id).Scan(&r.attempts, &r.lastError, &r.processed, &r.dead, &r.wait)
	if err != nil {
		t.Fatal(err)
	}
	return r
}

// waitRow waits until an event's row is as cond says, and returns it.
func (o *outbox) waitRow(t *testing.T, id, what string, cond func(row) bool) row {
	t.Helper()
	var r row
	testenv.Eventually(t, patience, fmt.Sprintf("event %s %s", id, what), func() bool {
		r = o.row(t, id)
		return cond(r)
	})
	return r
}

func (o *outbox) waitProcessed(t *testing.T, id string) row {
	t.Helper()
	return o.waitRow(t, id, "is processed", func(r row) bool { return r.processed })
}

func (o *outbox) waitDead(t *testing.T, id string) row {
	t.Helper()
	return o.waitRow(t, id, "is a dead letter", func(r row) bool { return r.dead })
}

// count counts rows.
func (o *outbox) count(t *testing.T, where string) int {
	t.Helper()
	var n int
	if err := o.db.QueryRowContext(t.Context(), "SELECT count(*) FROM outbox_events WHERE "+where).Scan(&n); err != nil {
		t.Fatal(err)
	}
	return n
}

// channel opens an AMQP channel to an outbox's broker, for what a test does as its operator.
func (o *outbox) channel(t *testing.T) *amqp.Channel {
	t.Helper()
	conn, err := amqp.DialConfig(o.amqpURL, amqp.Config{Dial: amqp.DefaultDial(5 * time.Second)})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = conn.Close() })
	ch, err := conn.Channel()
	if err != nil {
		t.Fatal(err)
	}
	return ch
}

// deliveries counts how often each message-id came. What a broker delivers again after a link to
// the test's own consumer was lost is no copy.
func deliveries(ds []amqp.Delivery) map[string]int {
	copies := make(map[string]int)
	for _, d := range ds {
		if !d.Redelivered || copies[d.MessageId] == 0 {
			copies[d.MessageId]++
		}
	}
	return copies
}

// wantReason fails the test unless an error text has all of these parts.
func wantReason(t *testing.T, what, got string, parts ...string) {
	t.Helper()
	for _, part := range parts {
		if !strings.Contains(got, part) {
			t.Errorf("%s = %q, want it to say %q", what, got, part)
		}
	}
}

func itoa(n int) string { return strconv.Itoa(n) }

// waitRowCount waits until so many rows are as where says.
func (o *outbox) waitRowCount(t *testing.T, where string, want int) {
	t.Helper()
	testenv.Eventually(t, patience, fmt.Sprintf("%d rows have %s", want, where), func() bool {
		return o.count(t, where) == want
	})
}

func readFile(t *testing.T, path string) string {
	t.Helper()
	text, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	return string(text)
}
