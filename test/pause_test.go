package test

import (
	"strings"
	"testing"
	"time"

	"outbox-relay/internal/testenv"
)

// Once pause has returned, nothing is published: not by the relay at work under load, not by one that
// takes over, and not by one that starts.
func TestPause(t *testing.T) {
	t.Parallel()
	bothOrderings(t, func(t *testing.T, ordering string) {
		o := newOutbox(t)
		q := testenv.Consume(t, o.amqpURL, exchange)
		first := o.start(t, ordering)
		first.Ready(t)
		second := o.start(t, ordering)
		second.Ready(t)
		l := o.startLoad(t)
		waitCount(t, q, 100)

		said, logged := o.ask(t, nil, "pause", "--reason=the queue moves")
		wantReason(t, "pause", said, "paused; relays that obey:")
		wantReason(t, "audit line", logged, `"msg":"outbox paused"`, `"command":"pause"`, "database user", "the queue moves")
		published := o.count(t, "processed_at IS NOT NULL")
		if s := o.status(t); !s.Paused || s.Doorbell.State != "deaf" {
			t.Errorf("status while paused = %+v", s)
		} else {
			wantReason(t, "paused by", s.By, "@", "database user", "the queue moves")
		}
		wantReason(t, "readiness", first.NotReady(t), "paused by an operator")
		if first.Metric(t, "outbox_paused") != 1 {
			t.Error("outbox_paused is not 1")
		}
		said, logged = o.ask(t, nil, "pause")
		wantReason(t, "second pause", said, "already paused since", "the queue moves")
		if logged != "" {
			t.Errorf("a pause that changed nothing is logged: %s", logged)
		}

		said, logged = o.ask(t, nil, "pause", "--reason=the queue moves again")
		wantReason(t, "pause with another reason", said, "already paused since", "the reason is yours now")
		wantReason(t, "audit line", logged, "reason of the pause replaced", "the queue moves again")
		if s := o.status(t); !strings.HasSuffix(s.By, "the queue moves again") {
			t.Errorf("paused by %q", s.By)
		}

		first.Kill(t)
		waitLeader(t, second, true)
		third := o.start(t, ordering)
		o.waitStatus(t, "both are there", func(s status) bool { return len(s.Relays) == 2 })
		o.ask(t, nil, "pause") // waits until they obey
		waitCount(t, q, published)
		if n := len(deliveries(q.Received())); n != published {
			t.Errorf("%d events were delivered, want the %d that were marked when pause returned", n, published)
		}
		l.stop()
		if o.count(t, "processed_at IS NULL") == 0 {
			t.Error("nothing was left to publish, so the test shows nothing")
		}

		said, logged = o.ask(t, nil, "resume")
		wantReason(t, "resume", said, "resumed")
		wantReason(t, "audit line", logged, `"msg":"outbox resumed"`, "the queue moves")
		if ordering == "ORDERING=aggregate" {
			o.verify(t, q, l.rolledBack, 0)
		} else {
			o.verifyUnordered(t, q, l.rolledBack, 0)
		}
		third.Ready(t)
		said, _ = o.ask(t, nil, "resume")
		wantReason(t, "second resume", said, "not paused")
	})
}

func TestPauseWithoutARelayHoldsForTheNext(t *testing.T) {
	t.Parallel()
	o := newOutbox(t)
	q := testenv.Consume(t, o.amqpURL, exchange)
	said, _ := o.ask(t, nil, "pause")
	wantReason(t, "pause", said, "no relay works at present")
	o.insert(t, event{})
	p := o.start(t)
	p.WaitLog(t, patience, "paused by an operator")
	q.Quiet(t, time.Second)
	o.ask(t, nil, "resume")
	q.Next(t, patience)
	p.Ready(t)
}
