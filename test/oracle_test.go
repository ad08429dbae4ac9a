package test

import (
	"fmt"
	"testing"
	"time"

	amqp "github.com/rabbitmq/amqp091-go"

	"outbox-relay/internal/testenv"
)

// verify is the oracle. It waits until every committed event has reached q and is marked, and
// then fails the test if anything else did, if the first deliveries of an aggregate's events are
// not in order, if an attempt was counted, or if there are more than maxDuplicates copies. rolledBack
// holds the ids of events whose transactions were rolled back.
//
// The table says what was committed: where the server died in a commit, nobody else knows.
func (o *outbox) verify(t *testing.T, q *testenv.Queue, rolledBack map[string]bool, maxDuplicates int) {
	t.Helper()
	o.verifyUnordered(t, q, rolledBack, maxDuplicates)
	last := make(map[string]int64)
	seen := make(map[string]bool)
	committed := o.committed(t)
	wrong := 0
	for _, d := range q.Received() {
		e, ok := committed[d.MessageId]
		if !ok || seen[d.MessageId] {
			continue
		}
		seen[d.MessageId] = true
		if e.seq < last[e.aggregate] {
			if wrong++; wrong <= 3 {
				t.Errorf("event %s, seq %d of aggregate %s, was first delivered after seq %d", d.MessageId, e.seq, e.aggregate, last[e.aggregate])
			}
		}
		last[e.aggregate] = max(last[e.aggregate], e.seq)
	}
	if wrong > 3 {
		t.Errorf("%d events out of order in all", wrong)
	}
}

// verifyUnordered is verify without a look at the order.
func (o *outbox) verifyUnordered(t *testing.T, q *testenv.Queue, rolledBack map[string]bool, maxDuplicates int) {
	t.Helper()
	committed := o.committed(t)
	o.awaitAll(t, q, committed)

	duplicates := 0
	for id, n := range deliveries(q.Received()) {
		duplicates += n - 1
		if rolledBack[id] {
			t.Errorf("event %s was delivered although its transaction was rolled back", id)
		} else if _, ok := committed[id]; !ok {
			t.Errorf("event %s was delivered and is not in the table", id)
		}
	}
	t.Logf("%d committed, %d rolled back, %d duplicates", len(committed), len(rolledBack), duplicates)
	if duplicates > maxDuplicates {
		t.Errorf("%d duplicates, want at most %d", duplicates, maxDuplicates)
	}
	for _, e := range testenv.Query[string](t, o.dsn,
		`SELECT format('event %s: attempts %s, last_error %s', id, attempts, last_error) FROM outbox_events
		 WHERE attempts <> 0 OR last_error IS NOT NULL OR dead_at IS NOT NULL LIMIT 3`) {
		t.Errorf("an outage left its mark on %s", e)
	}
}

// awaitAll waits as long as events keep coming.
func (o *outbox) awaitAll(t *testing.T, q *testenv.Queue, committed map[string]committedEvent) {
	t.Helper()
	arrived := make(map[string]bool)
	looked := 0
	progress := time.Now()
	for {
		ds := q.Received()
		for _, d := range ds[looked:] {
			if _, ok := committed[d.MessageId]; ok {
				arrived[d.MessageId] = true
			}
		}
		if len(ds) > looked {
			looked, progress = len(ds), time.Now()
		}
		if len(arrived) == len(committed) && o.count(t, "processed_at IS NULL") == 0 {
			return
		}
		if time.Since(progress) > patience {
			break
		}
		time.Sleep(20 * time.Millisecond)
	}
	lost := 0
	for id, e := range committed {
		if !arrived[id] {
			if lost++; lost <= 3 {
				t.Errorf("event %s, seq %d of aggregate %s, was not delivered: %+v", id, e.seq, e.aggregate, o.row(t, id))
			}
		}
	}
	t.Fatalf("%d of %d events were not delivered, %d are not marked", lost, len(committed), o.count(t, "processed_at IS NULL"))
}

type committedEvent struct {
	aggregate string
	seq       int64
}

func (o *outbox) committed(t *testing.T) map[string]committedEvent {
	t.Helper()
	rows, err := o.db.QueryContext(t.Context(), `SELECT id, aggregate_type || ' ' || aggregate_id, seq FROM outbox_events`)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = rows.Close() }()
	all := make(map[string]committedEvent)
	for rows.Next() {
		var id string
		var e committedEvent
		if err := rows.Scan(&id, &e.aggregate, &e.seq); err != nil {
			t.Fatal(err)
		}
		all[id] = e
	}
	if err := rows.Err(); err != nil {
		t.Fatal(err)
	}
	return all
}

// waitCount waits until q has received n messages in all.
func waitCount(t *testing.T, q *testenv.Queue, n int) {
	t.Helper()
	q.WaitFor(t, patience, fmt.Sprintf("%d messages", n), func(ds []amqp.Delivery) bool { return len(ds) >= n })
}
