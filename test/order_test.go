package test

import (
	"slices"
	"testing"

	"outbox-relay/internal/testenv"
)

// types lists the types of the messages in the order they came.
func types(q *testenv.Queue) (types []string) {
	for _, d := range q.Received() {
		types = append(types, d.Type)
	}
	return types
}

func TestFollowersWaitForAFailingHeadAndOthersDoNot(t *testing.T) {
	t.Parallel()
	o := newOutbox(t)
	q := testenv.Consume(t, o.amqpURL, exchange, "second", "third", "other")
	o.start(t, "RETRY_BASE=200ms", "RETRY_MAX=500ms", "MAX_ATTEMPTS=1000").Ready(t)
	head := o.insert(t, event{eventType: "first"})[0]
	o.waitRow(t, head, "has failed", func(r row) bool { return r.attempts > 0 })
	o.insert(t, event{eventType: "second"}, event{eventType: "third"}, event{aggregate: "2", eventType: "other"})
	waitCount(t, q, 1)
	o.waitRow(t, head, "has failed again", func(r row) bool { return r.attempts > 3 })
	if got := types(q); !slices.Equal(got, []string{"other"}) {
		t.Fatalf("delivered %v while the head failed, want the other aggregate's event alone", got)
	}
	if err := o.channel(t).QueueBind(q.Name, "first", exchange, false, nil); err != nil {
		t.Fatal(err)
	}
	waitCount(t, q, 4)
	if got := types(q); !slices.Equal(got, []string{"other", "first", "second", "third"}) {
		t.Errorf("delivered %v, want the aggregate in order", got)
	}
}

func TestDeadLetterLetsOthersGoOnOrHoldsThem(t *testing.T) {
	t.Parallel()
	for _, mode := range []string{"continue", "hold"} {
		t.Run(mode, func(t *testing.T) {
			t.Parallel()
			o := newOutbox(t)
			q := testenv.Consume(t, o.amqpURL, exchange, "second", "other")
			o.start(t, append(quick, "ON_DEAD_LETTER="+mode, "FALLBACK_INTERVAL=500ms")...).Ready(t)
			ids := o.insert(t, event{eventType: "first"}, event{eventType: "second"}, event{aggregate: "2", eventType: "other"})
			o.waitDead(t, ids[0])
			if mode == "continue" {
				waitCount(t, q, 2)
				return
			}
			o.insert(t, event{aggregate: "3", eventType: "other"})
			waitCount(t, q, 2)
			if got := types(q); slices.Contains(got, "second") {
				t.Fatalf("delivered %v, want the follower held back", got)
			}
			if err := o.channel(t).QueueBind(q.Name, "first", exchange, false, nil); err != nil {
				t.Fatal(err)
			}
			testenv.Exec(t, o.dsn, `UPDATE outbox_events SET attempts = 0, retry_after = NULL, last_error = NULL, dead_at = NULL
				WHERE dead_at IS NOT NULL`)
			waitCount(t, q, 4)
			if got := types(q)[2:]; !slices.Equal(got, []string{"first", "second"}) {
				t.Errorf("delivered %v after the dead letter was reset, want the aggregate in order", got)
			}
		})
	}
}

func TestRowLockedBySomebodyElseIsSentOnceAndMarkedLater(t *testing.T) {
	t.Parallel()
	o := newOutbox(t)
	q := testenv.Consume(t, o.amqpURL, exchange)
	p := o.start(t)
	p.Ready(t)
	tx, err := o.db.BeginTx(t.Context(), nil)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = tx.Rollback() }()
	// The row is locked before the relay knows of it: inserted and locked under the trigger's silence.
	testenv.Exec(t, o.dsn, "ALTER TABLE outbox_events DISABLE TRIGGER ALL")
	id := o.insert(t, event{})[0]
	if _, err := tx.ExecContext(t.Context(), "SELECT FROM outbox_events WHERE id = $1 FOR UPDATE", id); err != nil {
		t.Fatal(err)
	}
	o.insert(t, event{}) // its follower
	waitCount(t, q, 2)   // by the fallback poll
	testenv.Eventually(t, patience, "the relay says that a row is locked", func() bool { return p.Metric(t, "outbox_settle_skipped_total") > 0 })
	if r := o.row(t, id); r.processed {
		t.Fatal("the row is marked although it was locked")
	}
	if err := tx.Commit(); err != nil {
		t.Fatal(err)
	}
	o.waitProcessed(t, id)
	wantOnce(t, q)
}

func TestEventThatCommitsLateIsNotPassedOver(t *testing.T) {
	t.Parallel()
	o := newOutbox(t)
	q := testenv.Consume(t, o.amqpURL, exchange)
	o.start(t, "FALLBACK_INTERVAL=1h").Ready(t)
	tx, err := o.db.BeginTx(t.Context(), nil)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = tx.Rollback() }()
	if _, err := tx.ExecContext(t.Context(), `INSERT INTO outbox_events (aggregate_type, aggregate_id, event_type, payload)
		VALUES ('order', 'late', 'late', '{}')`); err != nil {
		t.Fatal(err)
	}
	for range 20 { // others come, are published, and the relay looks on
		o.insertMany(t, 10, 10, "order.created")
	}
	waitCount(t, q, 200)
	if err := tx.Commit(); err != nil {
		t.Fatal(err)
	}
	waitCount(t, q, 201)
}

func TestSeqDecidesTheOrderAndNotCreatedAt(t *testing.T) {
	t.Parallel()
	o := newOutbox(t)
	q := testenv.Consume(t, o.amqpURL, exchange)
	testenv.Exec(t, o.dsn, `INSERT INTO outbox_events (aggregate_type, aggregate_id, event_type, payload, created_at)
		VALUES ('order', '1', 'first', '{}', now()), ('order', '1', 'second', '{}', now() - interval '1 hour'),
		       ('order', '1', 'third', '{}', 'infinity')`)
	o.start(t)
	waitCount(t, q, 3)
	if got := types(q); !slices.Equal(got, []string{"first", "second", "third"}) {
		t.Errorf("delivered %v, want the order of insertion", got)
	}
}
