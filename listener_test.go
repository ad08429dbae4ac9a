package main

import (
	"context"
	"log/slog"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/testutil"

	"outbox-relay/internal/testenv"
)

// A server may refuse LISTEN, as a standby does. It is tried again until it succeeds, and then
// whatever was missed is looked for.
func TestRefusedListenIsTriedAgain(t *testing.T) {
	primary := testenv.OwnPostgres(t, testenv.Options{})
	standby := primary.Standby(t)
	cfg, m := testConfig(), newMetrics(prometheus.NewRegistry())
	cfg.DatabaseURL = standby.DSN
	notified, reconnected := NewBell(), NewBell()
	ctx, stop := context.WithCancel(t.Context())
	ended := make(chan struct{})
	listener := NewListener(cfg, slog.New(slog.DiscardHandler), m, notified, reconnected)
	go func() {
		defer close(ended)
		listener.Run(ctx)
	}()
	t.Cleanup(func() {
		stop()
		<-ended
	})
	testenv.Eventually(t, time.Minute, "LISTEN was refused twice", func() bool {
		return testutil.ToFloat64(m.ConnectionFailures[PeerListener]) >= 2
	})
	if testutil.ToFloat64(m.Connected[PeerListener]) != 0 {
		t.Error("connected while LISTEN is refused")
	}
	standby.Promote(t)
	select {
	case <-reconnected:
	case <-time.After(time.Minute):
		t.Fatal("not told that notifications may have been missed")
	}
	notify := func() {
		t.Helper()
		testenv.Exec(t, standby.DSN, "NOTIFY outbox_event")
		select {
		case <-notified:
		case <-time.After(time.Minute):
			t.Fatal("not notified")
		}
	}
	notify()
	before := testenv.Value[int](t, standby.DSN, listening)
	listener.Reconnect()
	testenv.Eventually(t, time.Minute, "another session listens", func() bool {
		pids := testenv.Query[int](t, standby.DSN, listening)
		return len(pids) == 1 && pids[0] != before
	})
	notify()
}

// listening finds the session that listens, by what it did last.
const listening = "SELECT pid FROM pg_stat_activity WHERE application_name = 'outbox-relay' AND query LIKE 'LISTEN%'"

func TestListenerHeedsItsOwnTable(t *testing.T) {
	l := NewListener(testConfig(), slog.New(slog.DiscardHandler), newMetrics(prometheus.NewRegistry()), NewBell(), NewBell())
	const table = 3_000_000_001 // over 2^31, as an oid may be
	for _, tt := range []struct {
		payload       string
		before, after bool
	}{
		{"3000000001", true, true},
		{"16384", true, false},
		{"", true, true}, // by hand, or by an older trigger
		{"0b9e8f1c-2f0e-4a52-9d0c-2f6a3c1f7f10", true, true},
	} {
		l.Heed(0)
		if got := l.concerns(tt.payload); got != tt.before {
			t.Errorf("%q before the table is known: heeded %v", tt.payload, got)
		}
		l.Heed(table)
		if got := l.concerns(tt.payload); got != tt.after {
			t.Errorf("%q: heeded %v, want %v", tt.payload, got, tt.after)
		}
	}
}

// deafEars hear no probe until they are healed.
type deafEars struct {
	fakeEars
	baton  *baton
	healed bool
	anew   int // how often another connection was asked for
}

func (e *deafEars) Reconnect() { e.anew++ }

func (e *deafEars) Heard() time.Time {
	e.baton.pass()
	if e.healed {
		return time.Now()
	}
	return time.Time{}
}

// Without notifications the relay is slow, not stuck: the metric and one line in the log say so,
// and it stays ready.
func TestNotificationsThatDoNotArriveAreNoticed(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		ears := &deafEars{}
		var log syncBuffer
		r := newRig(t, func(r *rig) {
			ears.baton, r.ears, r.log = r.publisher.baton, ears, slog.New(slog.NewTextHandler(&log, nil))
			r.metrics.ListenHealthy.Set(1)
		})
		r.step(5 * time.Minute)
		if got := testutil.ToFloat64(r.metrics.ListenHealthy); got != 0 {
			t.Errorf("outbox_listen_healthy = %v, want 0", got)
		}
		if n := strings.Count(log.String(), "notifications do not arrive: events wait for the fallback poll"); n != 1 {
			t.Errorf("logged %d times in 5 minutes, want once", n)
		}
		if want := int(5 * time.Minute / probeInterval); ears.anew < want-1 || ears.anew > want {
			t.Errorf("another connection was asked for %d times in 5 minutes, want once for each of %d proofs", ears.anew, want)
		}
		if ok, reasons := r.health.Ready(); !ok {
			t.Errorf("not ready: %v", reasons)
		}
		r.session.pending = eventsUpTo(1)
		r.step(6 * time.Second)
		if len(r.session.pending) != 0 {
			t.Error("the fallback poll did not find the event")
		}
		ears.healed = true
		r.step(time.Minute)
		if got := testutil.ToFloat64(r.metrics.ListenHealthy); got != 1 {
			t.Errorf("outbox_listen_healthy = %v after notifications arrive again, want 1", got)
		}
		r.stop()
		r.step(0)
	})
}
