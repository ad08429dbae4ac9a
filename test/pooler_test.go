package test

import (
	"strings"
	"testing"

	"outbox-relay/internal/testenv"
)

// Locks and LISTEN need a session of their own, which a pooler in transaction mode does not give.
func TestTransactionPoolerIsRefused(t *testing.T) {
	t.Parallel()
	pg := testenv.OwnPostgres(t, testenv.Options{Ports: []string{testenv.PoolerPort}})
	o := outboxOn(t, pg.DSN, testenv.Vhost(t))
	q := testenv.Consume(t, o.amqpURL, exchange)
	o.insertMany(t, 10, 10, "order.created")
	pooled := pg.Pooler(t, "transaction")

	p := testenv.Start(t, "DATABASE_URL="+pooled, "AMQP_URL="+o.amqpURL)
	if code := p.Wait(t, patience); code != 2 {
		t.Errorf("run: exit code %d, want 2: a restart will not help", code)
	}
	wantReason(t, "log", p.Logs(), "transaction pooler", "name the server itself")
	if n := len(q.Received()); n > 0 {
		t.Errorf("%d events were published", n)
	}
	code, _, stderr := testenv.Command(t, []string{"DATABASE_URL=" + pooled}, "migrate")
	if code == 0 || !strings.Contains(stderr, "pooler") {
		t.Errorf("migrate: exit code %d, %s", code, stderr)
	}
	wantRefused(t, pooled, 2, []string{"pause"}, "transaction pooler", "name the server itself")
	wantFinding(t, doctor(t, "DATABASE_URL="+pooled, "AMQP_URL="+o.amqpURL), "postgres", "fault", "transaction pooler")
	// Nothing of ours may be left in a session that the pooler hands to others.
	if limit := testenv.Value[string](t, pooled, "SHOW statement_timeout"); limit != "0" {
		t.Errorf("the pooler's session was left with a statement_timeout of %s", limit)
	}
}

// A pooler in session mode passes everything on.
func TestSessionPoolerWorks(t *testing.T) {
	t.Parallel()
	pg := testenv.OwnPostgres(t, testenv.Options{Ports: []string{testenv.PoolerPort}})
	o := outboxOn(t, pg.DSN, testenv.Vhost(t))
	q := testenv.Consume(t, o.amqpURL, exchange)
	pooled := pg.Pooler(t, "session")
	p := testenv.Start(t, "DATABASE_URL="+pooled, "AMQP_URL="+o.amqpURL, "FALLBACK_INTERVAL=1h")
	p.Ready(t)
	if s := (&outbox{dsn: pooled}).status(t); len(s.Relays) != 1 {
		t.Errorf("status = %+v, want the relay", s)
	}
	for range 3 {
		id := o.insert(t, event{})[0]
		if d := q.Next(t, patience); d.MessageId != id {
			t.Fatalf("got %s, want %s", d.MessageId, id)
		}
	}
}
