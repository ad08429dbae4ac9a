package testenv

import (
	"database/sql"
	"errors"
	"strings"
	"testing"
	"time"

	"github.com/lib/pq"
	amqp "github.com/rabbitmq/amqp091-go"
)

func TestMain(m *testing.M) { Main(m) }

func TestEachTestHasADatabaseOfItsOwn(t *testing.T) {
	t.Parallel()
	one, two := Database(t), Database(t)
	Exec(t, one, "CREATE TABLE t (i int); INSERT INTO t SELECT generate_series(1, 3)")
	if got := Query[int](t, one, "SELECT i FROM t ORDER BY i DESC"); len(got) != 3 || got[0] != 3 {
		t.Errorf("rows = %v, want 3 2 1", got)
	}
	if got := Value[sql.NullString](t, two, "SELECT to_regclass('t')"); got.Valid {
		t.Error("a table of one database is seen in another")
	}
}

func TestDatabaseIsDroppedWithItsSessions(t *testing.T) {
	t.Parallel()
	Short(t)
	var dsn string
	var db *sql.DB
	made := t.Run("user", func(t *testing.T) {
		dsn = Database(t)
		db, _ = sql.Open("postgres", dsn)
		if err := db.Ping(); err != nil {
			t.Fatal(err)
		}
	})
	if !made {
		return
	}
	defer func() { _ = db.Close() }()
	err := withDB(dsn, (*sql.DB).Ping)
	if pqErr := new(pq.Error); !errors.As(err, &pqErr) || pqErr.Code != "3D000" {
		t.Errorf("connect to the dropped database: %v, want SQLSTATE 3D000", err)
	}
}

func TestEachTestHasAVhostOfItsOwn(t *testing.T) {
	t.Parallel()
	one, two := Vhost(t), Vhost(t)
	q, other := Consume(t, one, "outbox", "order.*"), Consume(t, two, "outbox")
	for _, key := range []string{"order.placed", "stock.low", "order.paid"} {
		publish(t, one, "outbox", key, key)
	}
	got := q.Collect(t, 2, 10*time.Second)
	if got[0].RoutingKey != "order.placed" || got[1].RoutingKey != "order.paid" {
		t.Errorf("got %s, %s; want order.placed, order.paid", got[0].RoutingKey, got[1].RoutingKey)
	}
	if one != two { // the same where the server cannot make vhosts
		other.Quiet(t, 50*time.Millisecond)
	}
}

func TestOwnPostgresKeepsItsAddressAndData(t *testing.T) {
	t.Parallel()
	pg := OwnPostgres(t, Options{Args: []string{"-c", "wal_level=logical"}})
	if got := Value[string](t, pg.DSN, "SHOW wal_level"); got != "logical" {
		t.Errorf("wal_level = %s, want logical", got)
	}
	Exec(t, pg.DSN, "CREATE TABLE kept ()")
	for _, end := range []func(testing.TB){pg.Stop, pg.Kill} {
		end(t)
		if err := withDB(pg.DSN, (*sql.DB).Ping); err == nil {
			t.Error("a stopped server answers")
		}
		pg.Start(t)
		Exec(t, pg.DSN, "SELECT FROM kept")
	}
}

func TestPausedServerDoesNotAnswer(t *testing.T) {
	t.Parallel()
	pg := OwnPostgres(t, Options{})
	pg.Pause(t)
	if err := withDB(pg.DSN+"&connect_timeout=1", (*sql.DB).Ping); err == nil {
		t.Error("a paused server answers")
	}
	pg.Unpause(t)
	Exec(t, pg.DSN, "SELECT 1")
}

func TestQueueOutlivesARestartOfTheBroker(t *testing.T) {
	t.Parallel()
	mq := OwnRabbitMQ(t, Options{})
	q := Consume(t, mq.URL, "outbox")
	publish(t, mq.URL, "outbox", "a", "before")
	if got := string(q.Next(t, 10*time.Second).Body); got != "before" {
		t.Errorf("got %q, want before", got)
	}
	mq.Stop(t)
	mq.Start(t)
	mq.Kill(t)
	mq.Start(t)
	publish(t, mq.URL, "outbox", "a", "after")
	if got := string(q.Next(t, 20*time.Second).Body); got != "after" {
		t.Errorf("got %q, want after", got)
	}
	if out := mq.Ctl(t, "list_queues", "name"); !strings.Contains(out, q.Name) {
		t.Errorf("rabbitmqctl list_queues: %s, want %s among them", out, q.Name)
	}
}

func publish(t *testing.T, amqpURL, exchange, key, body string) {
	t.Helper()
	conn, err := dialAMQP(amqpURL)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = conn.Close() }()
	ch, err := conn.Channel()
	if err != nil {
		t.Fatal(err)
	}
	if err := ch.Confirm(false); err != nil {
		t.Fatal(err)
	}
	confirm, err := ch.PublishWithDeferredConfirm(exchange, key, true, false,
		amqp.Publishing{Body: []byte(body), DeliveryMode: amqp.Persistent})
	if err != nil {
		t.Fatal(err)
	}
	if ok, err := confirm.WaitContext(t.Context()); !ok || err != nil {
		t.Fatalf("publish: confirmed %t, %v", ok, err)
	}
}

func TestRelayRunsAsAChild(t *testing.T) {
	t.Parallel()
	dsn, amqpURL := Database(t), Vhost(t)
	env := []string{"DATABASE_URL=" + dsn, "AMQP_URL=" + amqpURL}
	if code, stdout, stderr := Command(t, env, "migrate"); code != 0 {
		t.Fatalf("migrate: exit code %d\n%s%s", code, stdout, stderr)
	}
	q := Consume(t, amqpURL, "outbox")
	relay := Start(t, env...)
	relay.Ready(t)
	id := Value[string](t, dsn, `INSERT INTO outbox_events (aggregate_type, aggregate_id, event_type, payload)
		VALUES ('order', '1', 'order.placed', '{}') RETURNING id`)
	if got := q.Next(t, 10*time.Second); got.MessageId != id {
		t.Errorf("message-id = %s, want %s", got.MessageId, id)
	}
	if got := relay.Stop(t); got != 0 {
		t.Errorf("exit code = %d, want 0", got)
	}
}
