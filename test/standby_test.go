package test

import (
	"syscall"
	"testing"
	"time"

	"outbox-relay/internal/testenv"
)

// waitLeader waits until p works, or stands by.
func waitLeader(t *testing.T, p *testenv.Process, leads bool) {
	t.Helper()
	want, what := 0.0, "the relay stands by"
	if leads {
		want, what = 1, "the relay works"
	}
	testenv.Eventually(t, patience, what, func() bool { return p.Metric(t, "outbox_leader") == want })
}

func TestStandbyTakesOverWhenTheRelayIsKilled(t *testing.T) {
	t.Parallel()
	o := newOutbox(t)
	q := testenv.Consume(t, o.amqpURL, exchange)
	const batch = 50
	first := o.start(t, "BATCH_SIZE=50")
	waitLeader(t, first, true)
	second := o.start(t, "BATCH_SIZE=50")
	second.Ready(t) // a rolling deploy waits for that
	second.WaitLog(t, patience, "standing by")
	wantReason(t, "standby's log", second.Logs(), "application_name")
	l := o.startLoad(t)
	waitPublished(t, first, 100)
	if n := second.Metric(t, "outbox_events_published_total"); n != 0 {
		t.Errorf("the standby published %v events", n)
	}
	waitLeader(t, second, false)
	first.Kill(t)
	killed := time.Now()
	waitLeader(t, second, true)
	if d := time.Since(killed); d > 10*time.Second {
		t.Errorf("the standby took over after %v, want about a second", d)
	}
	waitPublished(t, second, 100)
	l.stop()
	o.verify(t, q, l.rolledBack, batch*3/2)
}

// A rolling deploy: the new relay is ready while the old one works, and takes over when it ends.
func TestRollingDeploy(t *testing.T) {
	t.Parallel()
	o := newOutbox(t)
	q := testenv.Consume(t, o.amqpURL, exchange)
	l := o.startLoad(t)
	old := o.start(t)
	old.Ready(t)
	for range 3 {
		next := o.start(t)
		next.Ready(t)
		if code := old.Stop(t); code != 0 {
			t.Errorf("exit code %d, want 0", code)
		}
		waitLeader(t, next, true)
		waitPublished(t, next, 50)
		old = next
	}
	l.stop()
	o.verify(t, q, l.rolledBack, 0)
}

// A relay that froze loses its locks, and when it wakes up it must neither publish on nor
// overwrite what the other one has done.
func TestStandbyTakesOverWhenTheRelayFreezes(t *testing.T) {
	t.Parallel()
	o := newOutbox(t)
	q := testenv.Consume(t, o.amqpURL, exchange)
	const batch = 50
	first := o.start(t, "BATCH_SIZE=50")
	waitLeader(t, first, true)
	second := o.start(t, "BATCH_SIZE=50")
	second.Ready(t)
	l := o.startLoad(t)
	waitPublished(t, first, 100)
	first.Signal(t, syscall.SIGSTOP)
	frozen := time.Now()
	waitLeader(t, second, true)
	if d := time.Since(frozen); d > 20*time.Second {
		t.Errorf("the standby took over after %v, want 15 s at most", d)
	}
	waitPublished(t, second, 100)
	first.Signal(t, syscall.SIGCONT)
	waitLeader(t, first, false)
	waitPublished(t, second, 100)
	l.stop()
	o.verify(t, q, l.rolledBack, batch*3/2)
}

func TestUnorderedRelaysShareTheWork(t *testing.T) {
	t.Parallel()
	o := newOutbox(t)
	q := testenv.Consume(t, o.amqpURL, exchange)
	var relays []*testenv.Process
	for range 2 {
		p := o.start(t, "ORDERING=none", "BATCH_SIZE=20")
		waitLeader(t, p, true)
		relays = append(relays, p)
	}
	l := o.startLoad(t)
	o.insertMany(t, 5000, 100, "order.created")
	for _, p := range relays {
		waitPublished(t, p, 100)
	}
	l.stop()
	o.verifyUnordered(t, q, l.rolledBack, 0)
}

// While writers are silent only the keeper of the doorbell looks for events; it calls the others when there is
// more than it can take.
func TestUnorderedRelaysAreCalledToABacklog(t *testing.T) {
	t.Parallel()
	o := newOutbox(t)
	q := testenv.Consume(t, o.amqpURL, exchange)
	keeper := o.start(t, "ORDERING=none", "BATCH_SIZE=20", "FALLBACK_INTERVAL=200ms")
	keeper.Ready(t)
	waitLeader(t, keeper, true)
	other := o.start(t, "ORDERING=none", "BATCH_SIZE=20", "FALLBACK_INTERVAL=1h")
	other.Ready(t)
	waitLeader(t, other, true)
	testenv.Exec(t, o.dsn, `SET outbox.notify = 'off';
		INSERT INTO outbox_events (aggregate_type, aggregate_id, event_type, payload)
		SELECT 'order', n::text, 'silent', '{}' FROM generate_series(1, 10000) n`)
	waitPublished(t, other, 100)
	o.verifyUnordered(t, q, nil, 0)
}

// Relays of the two orders exclude each other, so that a deploy which changes ORDERING keeps it.
func TestOrderedAndUnorderedRelaysExcludeEachOther(t *testing.T) {
	t.Parallel()
	for _, tt := range []struct{ first, second string }{{"aggregate", "none"}, {"none", "aggregate"}} {
		t.Run(tt.second+" waits for "+tt.first, func(t *testing.T) {
			t.Parallel()
			o := newOutbox(t)
			q := testenv.Consume(t, o.amqpURL, exchange)
			first := o.start(t, "ORDERING="+tt.first)
			waitLeader(t, first, true)
			second := o.start(t, "ORDERING="+tt.second)
			second.Ready(t)
			second.WaitLog(t, patience, "standing by: a relay with another ORDERING works the outbox, and the two kinds exclude each other")
			second.WaitLog(t, patience, `"holder_ordering":"`+tt.first+`"`)
			wantFinding(t, o.doctor(t, "ORDERING="+tt.second), "relay", "warning", "works with ORDERING="+tt.first,
				"say ORDERING="+tt.second, "exclude each other", "the same ORDERING")
			o.insertMany(t, 100, 10, "order.created")
			q.Collect(t, 100, patience)
			if n := second.Metric(t, "outbox_events_published_total"); n != 0 {
				t.Errorf("ORDERING=%s published %v events beside ORDERING=%s", tt.second, n, tt.first)
			}
			if code := first.Stop(t); code != 0 {
				t.Errorf("exit code %d, want 0", code)
			}
			o.insertMany(t, 100, 10, "order.created")
			waitLeader(t, second, true)
			o.verify(t, q, nil, 0)
		})
	}
}
