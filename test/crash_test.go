package test

import (
	"fmt"
	"sync"
	"testing"

	"outbox-relay/internal/testenv"
)

// waitPublished waits until p has published n events more than by now.
func waitPublished(t *testing.T, p *testenv.Process, n float64) {
	t.Helper()
	const metric = "outbox_events_published_total"
	from := p.Metric(t, metric)
	testenv.Eventually(t, patience, fmt.Sprintf("%v more events are published", n), func() bool {
		return p.Metric(t, metric) >= from+n
	})
}

// A deploy: SIGTERM, and the next relay begins. What was sent is marked before the end, so nothing
// is sent twice.
func TestTerminatedUnderLoad(t *testing.T) {
	t.Parallel()
	for _, ordering := range []string{"aggregate", "none"} {
		t.Run(ordering, func(t *testing.T) {
			t.Parallel()
			o := newOutbox(t)
			q := testenv.Consume(t, o.amqpURL, exchange)
			l := o.startLoad(t)
			for range 5 {
				p := o.start(t, "ORDERING="+ordering)
				waitPublished(t, p, 100)
				if code := p.Stop(t); code != 0 {
					t.Errorf("exit code %d after SIGTERM, want 0", code)
				}
			}
			l.stop()
			o.start(t, "ORDERING="+ordering)
			if ordering == "aggregate" {
				o.verify(t, q, l.rolledBack, 0)
			} else {
				o.verifyUnordered(t, q, l.rolledBack, 0)
			}
		})
	}
}

func TestKilledUnderLoad(t *testing.T) {
	t.Parallel()
	const kills, batch = 5, 50
	o := newOutbox(t)
	q := testenv.Consume(t, o.amqpURL, exchange)
	l := o.startLoad(t)
	settings := fmt.Sprintf("BATCH_SIZE=%d", batch)
	for range kills {
		p := o.start(t, settings)
		waitPublished(t, p, 100)
		p.Kill(t)
	}
	l.stop()
	o.start(t, settings)
	// In hand are at most one batch and the half of the one before.
	o.verify(t, q, l.rolledBack, kills*batch*3/2)
}

// The unordered relay's claim is a transaction, so its rows are free when it dies.
func TestUnorderedRelayKilledUnderLoad(t *testing.T) {
	t.Parallel()
	const kills, batch = 3, 50
	o := newOutbox(t)
	q := testenv.Consume(t, o.amqpURL, exchange)
	settings := []string{"ORDERING=none", fmt.Sprintf("BATCH_SIZE=%d", batch)}
	survivor := o.start(t, settings...)
	l := o.startLoad(t)
	for range kills {
		p := o.start(t, settings...)
		waitPublished(t, p, 50)
		p.Kill(t)
	}
	l.stop()
	o.verifyUnordered(t, q, l.rolledBack, kills*batch)
	if !survivor.Running() {
		t.Error("the other relay has ended")
	}
}

// Any session may be killed at any moment; the process goes on and no attempt is counted.
func TestSessionsKilledUnderLoad(t *testing.T) {
	t.Parallel()
	const rounds, batch = 10, 50
	o := newOutbox(t)
	q := testenv.Consume(t, o.amqpURL, exchange)
	p := o.start(t, fmt.Sprintf("BATCH_SIZE=%d", batch))
	l := o.startLoad(t)
	for range rounds {
		waitPublished(t, p, 20)
		o.killSessions(t, "%")
	}
	waitPublished(t, p, 20)
	l.stop()
	o.verify(t, q, l.rolledBack, rounds*batch*3/2)
	if !p.Running() {
		t.Error("the relay has ended")
	}
}

func TestConnectionToTheBrokerClosedUnderLoad(t *testing.T) {
	t.Parallel()
	const rounds, batch = 10, 50
	o := newOutbox(t)
	q := testenv.Consume(t, o.amqpURL, exchange)
	link := testenv.NewProxy(t, o.amqpURL)
	p := o.start(t, "AMQP_URL="+link.URL, fmt.Sprintf("BATCH_SIZE=%d", batch))
	l := o.startLoad(t)
	for range rounds {
		waitPublished(t, p, 20)
		link.Cut()
	}
	waitPublished(t, p, 20)
	l.stop()
	o.verify(t, q, l.rolledBack, rounds*batch*3/2)
	if n := p.Metric(t, "outbox_events_failed_total"); n != 0 {
		t.Errorf("outbox_events_failed_total = %v: cut links were counted as failures of events", n)
	}
}

// Two events of one aggregate whose transactions began in the other order than they got the lock:
// created_at is the start of the transaction, seq the truth.
func TestOrderIsThatOfSeqNotOfCreatedAt(t *testing.T) {
	t.Parallel()
	o := newOutbox(t)
	for i := range 200 {
		testenv.Exec(t, o.dsn,
			`INSERT INTO outbox_events (aggregate_type, aggregate_id, event_type, payload, created_at)
			 VALUES ('order', $1, 'order.changed', '{}', now() - $2 * interval '1 second')`, itoa(i%4), i)
	}
	q := testenv.Consume(t, o.amqpURL, exchange)
	o.start(t, "BATCH_SIZE=10")
	o.verify(t, q, nil, 0)
}

// Migrating a live outbox again must not get in the way of writers or relay.
func TestMigrateUnderLoad(t *testing.T) {
	t.Parallel()
	o := newOutbox(t)
	q := testenv.Consume(t, o.amqpURL, exchange)
	p := o.start(t)
	l := o.startLoad(t)
	waitPublished(t, p, 50)
	var both sync.WaitGroup
	for range 2 {
		both.Go(func() {
			code, stdout, stderr := testenv.Command(t, []string{"DATABASE_URL=" + o.dsn}, "migrate")
			if code != 0 {
				t.Errorf("migrate: exit code %d\n%s%s", code, stdout, stderr)
			}
		})
	}
	both.Wait()
	waitPublished(t, p, 50)
	l.stop()
	o.verify(t, q, l.rolledBack, 0)
}
