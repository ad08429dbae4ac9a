package test

import (
	"slices"
	"testing"
	"time"

	amqp "github.com/rabbitmq/amqp091-go"

	"outbox-relay/internal/testenv"
)

// lockRow locks an event's row as somebody else's session, until the returned function is called.
func (o *outbox) lockRow(t *testing.T, id string) (release func()) {
	t.Helper()
	tx, err := o.db.BeginTx(t.Context(), nil)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = tx.Rollback() })
	if _, err := tx.ExecContext(t.Context(), `SELECT FROM outbox_events WHERE id = $1 FOR UPDATE`, id); err != nil {
		t.Fatal(err)
	}
	return func() {
		if err := tx.Commit(); err != nil {
			t.Fatal(err)
		}
	}
}

// chain commits three events of one aggregate. The first is of type "head".
func (o *outbox) chain(t *testing.T) (ids []string) {
	t.Helper()
	return o.insert(t, event{aggregate: "chain", eventType: "head"},
		event{aggregate: "chain", eventType: "follower"}, event{aggregate: "chain", eventType: "follower"})
}

// idsOf lists the messages of the aggregate "chain" in the order they came.
func idsOf(ds []amqp.Delivery) (ids []string) {
	for _, d := range ds {
		if d.Headers["aggregate_id"] == "chain" {
			ids = append(ids, d.MessageId)
		}
	}
	return ids
}

// The head was published and cannot be marked, since somebody else has its row locked.
func TestLockedHeadIsPublishedOnceAndMarkedWhenItIsFree(t *testing.T) {
	t.Parallel()
	o := newOutbox(t)
	q := testenv.Consume(t, o.amqpURL, exchange)
	ids := o.chain(t)
	release := o.lockRow(t, ids[0])
	o.insertNeighbours(t, 100)
	p := o.start(t, "FALLBACK_INTERVAL=200ms") // many looks meanwhile
	o.wantNeighbours(t, q, 1)
	o.wantDelivered(t, q, "event_type = 'follower'", 1)
	time.Sleep(time.Second)
	o.insertNeighbours(t, 100)
	o.wantNeighbours(t, q, 1)
	if r := o.row(t, ids[0]); r.processed {
		t.Errorf("row = %+v, want it unmarked while it is locked", r)
	}
	if n := p.Metric(t, "outbox_settle_skipped_total"); n == 0 {
		t.Error("outbox_settle_skipped_total = 0, want it to show the locked row")
	}
	release()
	o.verify(t, q, nil, 0)
	if got := idsOf(q.Received()); !slices.Equal(got, ids) {
		t.Errorf("delivered %v, want %v", got, ids)
	}
}

// The head failed, and that cannot be written down. Its followers must wait all the same.
func TestFollowersWaitForALockedHeadThatFails(t *testing.T) {
	t.Parallel()
	o := newOutbox(t)
	q := testenv.Consume(t, o.amqpURL, exchange, "follower", neighbour)
	ids := o.chain(t)
	release := o.lockRow(t, ids[0])
	p := o.start(t, "FALLBACK_INTERVAL=200ms", "RETRY_BASE=200ms", "RETRY_MAX=500ms", "MAX_ATTEMPTS=1000")
	testenv.Eventually(t, patience, "the head is returned", func() bool { return outcomes(t, p, "returned") > 0 })
	for range 10 {
		o.insertNeighbours(t, 20)
		o.wantNeighbours(t, q, 1)
	}
	if got := idsOf(q.Received()); len(got) != 0 {
		t.Errorf("delivered %v while the head failed and was locked, want nothing of its aggregate", got)
	}
	if n := outcomes(t, p, "returned"); n != 1 {
		t.Errorf("the head was sent %d times before its failure was written down, want once", n)
	}
	release()
	r := o.waitRow(t, ids[0], "has failed twice", func(r row) bool { return r.attempts >= 2 })
	wantReason(t, "last_error", r.lastError, "returned", "NO_ROUTE")
	o.bind(t, q, "head")
	o.wantCopies(t, q, "true", 1)
	if got := idsOf(q.Received()); !slices.Equal(got, ids) {
		t.Errorf("delivered %v, want %v", got, ids)
	}
	if r, n := o.row(t, ids[0]), outcomes(t, p, "returned"); r.attempts != n {
		t.Errorf("%d attempts in the row, want the metric's %d returns", r.attempts, n)
	}
	wantFailures(t, p, "head", outcomes(t, p, "returned"))
}

// Unordered, a row that somebody else has locked is somebody else's.
func TestUnorderedRelayPassesALockedRowOver(t *testing.T) {
	t.Parallel()
	o := newOutbox(t)
	q := testenv.Consume(t, o.amqpURL, exchange)
	ids := o.chain(t)
	release := o.lockRow(t, ids[0])
	o.start(t, "ORDERING=none", "FALLBACK_INTERVAL=200ms")
	o.insertNeighbours(t, 100)
	o.wantNeighbours(t, q, 1)
	o.wantDelivered(t, q, "event_type = 'follower'", 1)
	wantAbsent(t, q, ids[0])
	release()
	o.verifyUnordered(t, q, nil, 0)
}

// An event may commit long after its successors were sent; it is behind all that the relay has
// dealt with by then. It follows them, once.
func TestEventThatCommitsAfterItsSuccessorsFollowsThem(t *testing.T) {
	t.Parallel()
	bothOrderings(t, func(t *testing.T, ordering string) {
		o := newOutbox(t)
		q := testenv.Consume(t, o.amqpURL, exchange)
		o.start(t, ordering, "FALLBACK_INTERVAL=1h").Ready(t)
		tx, err := o.db.BeginTx(t.Context(), nil)
		if err != nil {
			t.Fatal(err)
		}
		defer func() { _ = tx.Rollback() }()
		var late string
		err = tx.QueryRowContext(t.Context(), `INSERT INTO outbox_events (aggregate_type, aggregate_id, event_type, payload)
			VALUES ('order', 'chain', 'late', '{}') RETURNING id`).Scan(&late)
		if err != nil {
			t.Fatal(err)
		}
		ids := o.chain(t)
		for range 20 {
			o.insertNeighbours(t, 10)
			time.Sleep(100 * time.Millisecond) // the mark moves about once a second
		}
		o.wantNeighbours(t, q, 1)
		if err := tx.Commit(); err != nil {
			t.Fatal(err)
		}
		committed := time.Now()
		q.WaitFor(t, patience, "the late event", func(ds []amqp.Delivery) bool { return deliveries(ds)[late] > 0 })
		if took := time.Since(committed); took > 5*time.Second {
			t.Errorf("the late event was delivered after %v, want about a second at most", took)
		}
		o.verifyUnordered(t, q, nil, 0)
		if got := idsOf(q.Received()); len(got) != 4 || got[3] != late {
			t.Errorf("delivered %v, want %v and then %s", got, ids, late)
		}
	})
}
