package test

import (
	"fmt"
	"sync"
	"testing"
	"time"

	"outbox-relay/internal/testenv"
)

// killSessions ends the server sessions of an outbox's database whose last query is like pattern.
func (o *outbox) killSessions(t *testing.T, pattern string) int {
	t.Helper()
	var n int
	err := o.db.QueryRowContext(t.Context(),
		`SELECT count(pg_terminate_backend(pid)) FROM pg_stat_activity
		 WHERE datname = current_database() AND pid <> pg_backend_pid() AND application_name LIKE 'outbox-relay%' AND query LIKE $1`,
		pattern).Scan(&n)
	if err != nil {
		t.Fatal(err)
	}
	return n
}

// A listener that lost its session while nothing happened must be back for the next event: with
// a fallback poll an hour away, only a notification or the reconnect can bring it.
func TestListenSessionKilledWhileIdle(t *testing.T) {
	t.Parallel()
	o := newOutbox(t)
	q := testenv.Consume(t, o.amqpURL, exchange)
	p := o.start(t, "FALLBACK_INTERVAL=1h")
	p.Ready(t)
	for range 3 {
		connected := func() bool { return p.Metric(t, "outbox_connected", `server="listener"`) == 1 }
		testenv.Eventually(t, patience, "the relay listens", connected)
		before := p.Metric(t, "outbox_reconnects_total", `server="listener"`)
		testenv.Eventually(t, patience, "the LISTEN session is found", func() bool { return o.killSessions(t, "LISTEN%") > 0 })
		o.insert(t, event{}) // at the worst moment
		q.Next(t, patience)
		testenv.Eventually(t, patience, "the relay listens again", func() bool {
			return p.Metric(t, "outbox_reconnects_total", `server="listener"`) > before && connected()
		})
		o.insert(t, event{})
		q.Next(t, patience)
	}
	o.verify(t, q, nil, 0)
}

func TestEventsAreFoundWithoutTrigger(t *testing.T) {
	t.Parallel()
	o := newOutbox(t)
	testenv.Exec(t, o.dsn, "DROP TRIGGER outbox_notify ON outbox_events")
	q := testenv.Consume(t, o.amqpURL, exchange)
	p := o.start(t, "FALLBACK_INTERVAL=200ms")
	p.Ready(t)
	for range 5 {
		o.insert(t, event{})
		q.Next(t, patience)
	}
	o.insertMany(t, 3000, 30, "order.created") // drained at once, not a batch a poll
	o.verify(t, q, nil, 0)
	if n := p.Metric(t, "outbox_wakeups_total", `cause="notify"`); n != 0 {
		t.Errorf("%v wake-ups by notification, want none without a trigger", n)
	}
	if n := p.Metric(t, "outbox_wakeups_total", `cause="fallback"`); n == 0 {
		t.Error("no wake-up by the fallback poll")
	}
}

// Rows that no trigger announces: replication roles, and transactions that are to be prepared.
func TestSilentRowsAreFoundByTheFallbackPoll(t *testing.T) {
	t.Parallel()
	o := newOutbox(t)
	q := testenv.Consume(t, o.amqpURL, exchange)
	o.start(t, "FALLBACK_INTERVAL=200ms").Ready(t)
	for _, set := range []string{"SET session_replication_role = replica", "SET outbox.notify = 'off'"} {
		testenv.Exec(t, o.dsn, set+`;
			INSERT INTO outbox_events (aggregate_type, aggregate_id, event_type, payload) VALUES ('order', '1', 'silent', '{}')`)
		q.Next(t, patience)
	}
}

// A transaction that began long ago and commits late gets its events published at once: they are
// behind what the relay has seen by then.
func TestEventOfALateCommitIsPublished(t *testing.T) {
	t.Parallel()
	o := newOutbox(t)
	q := testenv.Consume(t, o.amqpURL, exchange)
	o.start(t, "FALLBACK_INTERVAL=1h").Ready(t)
	for range 5 {
		tx, err := o.db.BeginTx(t.Context(), nil)
		if err != nil {
			t.Fatal(err)
		}
		var late string
		err = tx.QueryRowContext(t.Context(),
			`INSERT INTO outbox_events (aggregate_type, aggregate_id, event_type, payload)
			 VALUES ('order', 'late', 'late', '{}') RETURNING id`).Scan(&late)
		if err != nil {
			t.Fatal(err)
		}
		for range 10 {
			id := o.insert(t, event{})[0]
			if d := q.Next(t, patience); d.MessageId != id {
				t.Fatalf("got %s, want %s", d.MessageId, id)
			}
		}
		if err := tx.Commit(); err != nil {
			t.Fatal(err)
		}
		if d := q.Next(t, 5*time.Second); d.MessageId != late {
			t.Fatalf("got %s, want the late %s", d.MessageId, late)
		}
	}
}

// A flood of notifications neither keeps the relay from working and ending nor fills the server's queue,
// which would make commits fail, whatever state the relay is in.
func TestFloodOfNotifications(t *testing.T) {
	t.Parallel()
	o := newProxied(t)
	q := testenv.Consume(t, o.amqpURL, exchange)
	p := o.start(t, "SHUTDOWN_TIMEOUT=6s")
	p.Ready(t)
	stop := make(chan struct{})
	var flood sync.WaitGroup
	for range 2 {
		flood.Go(func() {
			for {
				select {
				case <-stop:
					return
				default:
					_, _ = o.db.Exec(`SELECT pg_notify('outbox_event', i::text || clock_timestamp()) FROM generate_series(1, 1000) i`)
				}
			}
		})
	}
	defer flood.Wait()
	defer close(stop)
	o.insertMany(t, 1000, 100, "order.created")
	waitCount(t, q, 1000)
	wantNoQueue := func(when string) {
		t.Helper()
		testenv.Eventually(t, patience, "the server's queue of notifications is nearly empty "+when, func() bool {
			return testenv.Value[float64](t, o.dsn, "SELECT pg_notification_queue_usage()") < 0.01
		})
		for _, state := range testenv.Query[string](t, o.dsn, `SELECT state FROM pg_stat_activity
			WHERE datname = current_database() AND application_name LIKE 'outbox-relay%' AND query LIKE 'LISTEN%'`) {
			if state != "idle" {
				t.Errorf("the listening session is %q %s, want idle: in a transaction it would keep the queue", state, when)
			}
		}
	}
	wantNoQueue("while the relay works")
	o.broker.Refuse()
	p.NotReady(t)
	wantNoQueue("while the broker is down")
	o.broker.Resume()
	p.Ready(t)
	o.mustOperate(t, "pause")
	p.NotReady(t)
	wantNoQueue("while it is paused")
	o.mustOperate(t, "resume")
	p.Ready(t)
	o.insertMany(t, 1000, 100, "order.created")
	waitCount(t, q, 2000)
	began := time.Now()
	if code := p.Stop(t); code != 0 {
		t.Errorf("exit code %d, want 0", code)
	}
	if took := time.Since(began); took > 12*time.Second { // twice the time: the machine may be busy
		t.Errorf("it took %v to end, with SHUTDOWN_TIMEOUT=6s", took)
	}
}

// Notifications that come while the relay is busy fold into one look, also where several relays hear them.
func TestBurstOfNotificationsFoldsIntoFewLooks(t *testing.T) {
	t.Parallel()
	for _, ordering := range []string{"aggregate", "none"} {
		t.Run(ordering, func(t *testing.T) {
			t.Parallel()
			o := newOutbox(t)
			q := testenv.Consume(t, o.amqpURL, exchange)
			relays := []*testenv.Process{o.start(t, "ORDERING="+ordering)}
			waitLeader(t, relays[0], true)
			if ordering == "none" {
				relays = append(relays, o.start(t, "ORDERING="+ordering))
				waitLeader(t, relays[1], true)
			}
			for _, p := range relays {
				p.Ready(t)
				testenv.Eventually(t, patience, "the relay listens", func() bool { return p.Metric(t, "outbox_connected", `server="listener"`) == 1 })
			}
			var before []float64
			for _, p := range relays {
				before = append(before, p.Metric(t, "outbox_claims_total"))
			}
			const burst = 20_000
			testenv.Exec(t, o.dsn, fmt.Sprintf("SELECT pg_notify('outbox_event', 'burst ' || i) FROM generate_series(1, %d) i", burst))
			id := o.insert(t, event{})[0]
			if d := q.Next(t, patience); d.MessageId != id {
				t.Errorf("got %s, want %s", d.MessageId, id)
			}
			for i, p := range relays {
				if n := p.Metric(t, "outbox_claims_total") - before[i]; n > burst/20 {
					t.Errorf("relay %d looked for events %v times because of %d notifications", i, n, burst)
				}
			}
		})
	}
}

// While LISTEN does not work events leave by the fallback poll, and the relay stays ready.
func TestEventsLeaveWhileNobodyListens(t *testing.T) {
	t.Parallel()
	o := newOutbox(t)
	q := testenv.Consume(t, o.amqpURL, exchange)
	p := o.start(t, "FALLBACK_INTERVAL=500ms")
	p.Ready(t)
	stop := make(chan struct{})
	var killer sync.WaitGroup
	killer.Go(func() {
		for {
			select {
			case <-stop:
				return
			default:
				_, _ = o.db.Exec(`SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = current_database()
					AND application_name LIKE 'outbox-relay%' AND query LIKE 'LISTEN%'`)
			}
		}
	})
	defer killer.Wait()
	defer close(stop)
	fallbacks := p.Metric(t, "outbox_wakeups_total", `cause="fallback"`)
	for range 20 {
		o.insert(t, event{})
		q.Next(t, patience)
	}
	if n := p.Metric(t, "outbox_wakeups_total", `cause="fallback"`); n == fallbacks {
		t.Error("no look by the fallback poll")
	}
	p.Ready(t)
	if n := p.Metric(t, "outbox_connection_failures_total", `server="listener"`); n == 0 {
		t.Error("the listener was never in trouble: the test shows nothing")
	}
}

// A standby leaves the table alone, whatever rings.
func TestStandbyDoesNotLookForEvents(t *testing.T) {
	t.Parallel()
	o := newOutbox(t)
	q := testenv.Consume(t, o.amqpURL, exchange)
	first := o.start(t)
	waitLeader(t, first, true)
	second := o.start(t)
	second.Ready(t)
	second.WaitLog(t, patience, "standing by")
	for range 50 {
		o.insert(t, event{})
	}
	waitCount(t, q, 50)
	if n := second.Metric(t, "outbox_claims_total"); n != 0 {
		t.Errorf("the standby looked for events %v times, want never", n)
	}
}
