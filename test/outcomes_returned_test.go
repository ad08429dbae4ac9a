package test

import (
	"strings"
	"testing"
	"time"

	"outbox-relay/internal/testenv"
)

// The broker acknowledges a message for which there is no queue, and only returns it.
func TestReturnedEventIsDeliveredOnceItHasAQueue(t *testing.T) {
	t.Parallel()
	bothOrderings(t, func(t *testing.T, ordering string) {
		o := newOutbox(t)
		q := testenv.Consume(t, o.amqpURL, exchange, neighbour)
		p := o.start(t, ordering, "RETRY_BASE=200ms", "RETRY_MAX=500ms", "MAX_ATTEMPTS=1000")
		o.insertNeighbours(t, 50)
		id := o.insert(t, event{aggregate: "unroutable", eventType: "lost"})[0]
		o.insertNeighbours(t, 50)

		r := o.waitRow(t, id, "failed twice", func(r row) bool { return r.attempts >= 2 })
		p.WaitLog(t, patience, `"attempt":2,"reason":"312 NO_ROUTE`)
		p.WaitLog(t, patience, `"retry_within":"400ms"`)
		if r.processed || r.dead || !r.wait {
			t.Errorf("row = %+v, want it to wait for its retry", r)
		}
		wantReason(t, "last_error", r.lastError, "returned", "312", "NO_ROUTE", `routing key "lost"`)
		wantAbsent(t, q, id)
		o.wantNeighbours(t, q, 1)

		o.bind(t, q, "lost")
		r = o.waitProcessed(t, id)
		waitCount(t, q, 101)
		ds := q.Received()
		if d := ds[len(ds)-1]; d.MessageId != id || d.Headers["attempt"] != int64(r.attempts)+1 {
			t.Errorf("got %s, attempt %v, want %s, attempt %d", d.MessageId, d.Headers["attempt"], id, r.attempts+1)
		}
		if n := outcomes(t, p, "returned"); n != r.attempts {
			t.Errorf("%d returns counted by the metric, want the row's %d attempts", n, r.attempts)
		}
		wantFailures(t, p, "lost", r.attempts)
		if n := outcomes(t, p, "confirmed"); n != 101 {
			t.Errorf("%d confirmed, want 101", n)
		}
		wantConnectionKept(t, p)
		q.Collect(t, 101, patience)
		q.Quiet(t, 200*time.Millisecond)
	})
}

func TestReturnedEventBecomesADeadLetter(t *testing.T) {
	t.Parallel()
	bothOrderings(t, func(t *testing.T, ordering string) {
		o := newOutbox(t)
		q := testenv.Consume(t, o.amqpURL, exchange, neighbour)
		p := o.start(t, ordering, "RETRY_BASE=200ms", "MAX_ATTEMPTS=4", "FALLBACK_INTERVAL=500ms")
		p.Ready(t)
		o.insertNeighbours(t, 50)
		id := o.insert(t, event{aggregate: "unroutable", eventType: "lost"})[0]
		o.insertNeighbours(t, 50)

		o.wantDeadLetter(t, id, 4, "returned", "312", "NO_ROUTE", `routing key "lost"`)
		took := testenv.Value[float64](t, o.dsn, `SELECT extract(epoch FROM dead_at - created_at) FROM outbox_events WHERE id = $1`, id)
		// 200, 400 and 800 ms, each less up to a fifth.
		if least := 1.4 * 0.8; took < least {
			t.Errorf("dead after %v s, want at least %v s of backoff", took, least)
		}
		o.wantNeighbours(t, q, 1)
		wantAbsent(t, q, id)
		waitDeadLetters(t, p, 1)
		if n := outcomes(t, p, "returned"); n != 4 {
			t.Errorf("%d returns counted by the metric, want 4", n)
		}
		wantFailures(t, p, "lost", 4)
		wantConnectionKept(t, p)
		line := auditLine(t, p.Logs(), "event not published: returned, and given up: it is a dead letter now")
		if line["level"] != "ERROR" || line["event_id"] != id || line["attempt"] != 4.0 {
			t.Errorf("log of the dead letter = %v", line)
		}

		o.bind(t, q, "lost")
		o.mustOperate(t, "dead-letters", "retry", id)
		o.wantCopies(t, q, "true", 1) // the reason stays, as a record
	})
}

// A return carries the whole message back. The broker must be able to send it while the relay is
// still writing, or each waits for the other.
func TestLargeEventsAreReturned(t *testing.T) {
	t.Parallel()
	const n = 5
	o := newOutbox(t)
	q := testenv.Consume(t, o.amqpURL, exchange, neighbour)
	o.insertNeighbours(t, 50)
	large := event{eventType: "large", payload: `"` + strings.Repeat("x", 8<<20) + `"`}
	var ids []string
	for i := range n {
		large.aggregate = itoa(i)
		ids = append(ids, o.insert(t, large)...)
	}
	o.insertNeighbours(t, 50)
	p := o.start(t, "RETRY_BASE=100ms", "MAX_ATTEMPTS=2", "BATCH_BYTES=64000000")

	for _, id := range ids {
		o.wantDeadLetter(t, id, 2, "returned", "NO_ROUTE")
	}
	o.wantNeighbours(t, q, 1)
	if got := outcomes(t, p, "returned"); got != 2*n {
		t.Errorf("%d returns counted by the metric, want %d", got, 2*n)
	}
	wantFailures(t, p, "large", 2*n)
	wantConnectionKept(t, p)
}

func TestReturnedEventIsRetriedUntilItHasAQueue(t *testing.T) {
	t.Parallel()
	o := newOutbox(t)
	q := testenv.Consume(t, o.amqpURL, exchange, "order.created")
	p := o.start(t, "RETRY_BASE=200ms", "RETRY_MAX=500ms", "MAX_ATTEMPTS=1000")
	p.Ready(t)
	lost := o.neighbours(t, event{aggregate: "lost", eventType: "nobody.listens"})
	r := o.waitRow(t, lost[0], "has failed", func(r row) bool { return r.attempts > 0 })
	wantReason(t, "last_error", r.lastError, "returned", "312", "NO_ROUTE", "nobody.listens")
	waitCount(t, q, 100)
	if n := outcomes(t, p, "returned"); n < 1 {
		t.Errorf("returned = %v, want at least 1", n)
	}
	late := testenv.Consume(t, o.amqpURL, exchange, "nobody.listens")
	d := late.Next(t, patience)
	o.waitProcessed(t, lost[0])
	if n, ok := d.Headers["attempt"].(int64); !ok || n < 2 {
		t.Errorf("header attempt = %v, want over 1", d.Headers["attempt"])
	}
	wantOnce(t, q)
}

func TestEventOutOfAttemptsBecomesADeadLetter(t *testing.T) {
	t.Parallel()
	o := newOutbox(t)
	p := o.start(t, quick...)
	id := o.insert(t, event{eventType: "nobody.listens"})[0]
	r := o.waitDead(t, id)
	if r.attempts != 3 || r.processed || r.wait {
		t.Errorf("row = %+v, want three attempts and nothing more to come", r)
	}
	if n := testenv.Value[int](t, o.dsn, "SELECT count(*) FROM outbox_dead_letters"); n != 1 {
		t.Errorf("outbox_dead_letters holds %d rows, want 1", n)
	}
	testenv.Eventually(t, patience, "the gauge shows the dead letter", func() bool { return p.Metric(t, "outbox_dead_letters") == 1 })
	if n := p.Metric(t, "outbox_events_failed_total", `event_type="nobody.listens"`); n != 3 {
		t.Errorf("failed = %v, want 3", n)
	}
}
