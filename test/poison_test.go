package test

import (
	"testing"
	"time"

	"outbox-relay/internal/testenv"
)

// A crowd of events in backoff costs nothing: the relay sleeps until the next is due.
func TestRelaySleepsWhileAllEventsWaitForTheirRetry(t *testing.T) {
	t.Parallel()
	o := newOutbox(t)
	o.insertMany(t, 1500, 1500, "nobody.listens")
	p := o.start(t, "RETRY_BASE=1h", "RETRY_MAX=1h", "FALLBACK_INTERVAL=1h")
	o.waitRowCount(t, "attempts = 1 AND retry_after > now()", 1500)
	before := p.Metric(t, "outbox_claims_total")
	time.Sleep(3 * time.Second) // that nothing happens takes a while to see
	if n := p.Metric(t, "outbox_claims_total") - before; n > 5 {
		t.Errorf("%v looks for events in 3s, want next to none", n)
	}
	if n := o.count(t, "attempts <> 1"); n != 0 {
		t.Errorf("%d events were tried again before their time", n)
	}
}

// The wait counts from the failure, by the database's clock, and not from the claim or from created_at.
func TestRetryIsCountedFromTheFailure(t *testing.T) {
	t.Parallel()
	o := newOutbox(t)
	testenv.Exec(t, o.dsn, `INSERT INTO outbox_events (aggregate_type, aggregate_id, event_type, payload, created_at)
		SELECT 'order', i::text, 'nobody.listens', '{}', now() - interval '1 day' FROM generate_series(1, 500) i`)
	const base = 100.0 // seconds
	before := testenv.Value[float64](t, o.dsn, "SELECT extract(epoch FROM clock_timestamp())")
	o.start(t, "RETRY_BASE=100s")
	o.waitRowCount(t, "attempts = 1", 500)
	after := testenv.Value[float64](t, o.dsn, "SELECT extract(epoch FROM clock_timestamp())")
	earliest := testenv.Value[float64](t, o.dsn, "SELECT extract(epoch FROM min(retry_after)) FROM outbox_events")
	latest := testenv.Value[float64](t, o.dsn, "SELECT extract(epoch FROM max(retry_after)) FROM outbox_events")
	if earliest < before+base*0.8 || latest > after+base {
		t.Errorf("due from %.1f to %.1f s after the start, want from %.1f to %.1f", earliest-before, latest-before, base*0.8, after-before+base)
	}
}

// Two relays side by side follow one schedule: it stands in the row.
func TestRelaysSideBySideShareAnEventsAttempts(t *testing.T) {
	t.Parallel()
	o := newOutbox(t)
	const attempts = 4
	settings := []string{"ORDERING=none", "MAX_ATTEMPTS=4", "RETRY_BASE=200ms", "RETRY_MAX=1s", "FALLBACK_INTERVAL=100ms"}
	one, two := o.start(t, settings...), o.start(t, settings...)
	one.Ready(t)
	two.Ready(t)
	ids := o.insert(t, event{eventType: "nobody.listens"}, event{eventType: "nobody.listens", aggregate: "2"})
	for _, id := range ids {
		if r := o.waitDead(t, id); r.attempts != attempts {
			t.Errorf("attempts = %d, want %d", r.attempts, attempts)
		}
	}
	const returned = `outcome="returned"`
	sent := one.Metric(t, "outbox_event_outcomes_total", returned) + two.Metric(t, "outbox_event_outcomes_total", returned)
	if want := float64(attempts * len(ids)); sent != want {
		t.Errorf("the broker returned %v messages, want %v", sent, want)
	}
}
