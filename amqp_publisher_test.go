package main

import (
	"context"
	"errors"
	"log/slog"
	"net"
	"sync"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	amqp "github.com/rabbitmq/amqp091-go"
)

// newTestPublisher is one without a session: its goroutine's part is played by the test.
func newTestPublisher(t *testing.T, change func(*Config)) *AMQPPublisher {
	t.Helper()
	cfg := testConfig()
	cfg.AMQPExchange, cfg.AMQPRoutingKey = "outbox", "{event_type}"
	if change != nil {
		change(&cfg)
	}
	p, err := NewAMQPPublisher(cfg, slog.New(slog.DiscardHandler), newMetrics(prometheus.NewRegistry()), NewBell(), func() bool { return true })
	if err != nil {
		t.Fatal(err)
	}
	return p
}

// sameAggregate returns events 1 to n of one aggregate.
func sameAggregate(n int) (events []*Event) {
	for _, e := range eventsUpTo(n) {
		e.AggregateID = "1"
		events = append(events, e)
	}
	return events
}

// outcomes takes what was reported, by seq.
func (p *AMQPPublisher) outcomes() map[int64]Outcome {
	p.deliver()
	results, _ := p.Take()
	got := make(map[int64]Outcome)
	for _, r := range results {
		got[r.Event.Seq] = r.Outcome
	}
	return got
}

func seqs(events []*Event) (seqs []int64) {
	for _, e := range events {
		seqs = append(seqs, e.Seq)
	}
	return seqs
}

func TestOneEventOfAnAggregateGoesOutAtATime(t *testing.T) {
	p := newTestPublisher(t, nil)
	events := sameAggregate(3)
	p.Publish(events)
	p.accept()
	if got := seqs(p.ready); len(got) != 1 || got[0] != 1 {
		t.Fatalf("ready = %v, want the first alone", got)
	}
	p.ready = nil // written
	p.resolve(Result{Event: events[0], Outcome: Confirmed})
	if got := seqs(p.ready); len(got) != 1 || got[0] != 2 {
		t.Errorf("ready after the first was confirmed = %v, want the second alone", got)
	}
}

func TestAggregatesDoNotWaitForEachOther(t *testing.T) {
	p := newTestPublisher(t, nil)
	p.Publish(eventsUpTo(9)) // of three aggregates
	p.accept()
	if got := seqs(p.ready); len(got) != 3 {
		t.Errorf("ready = %v, want the first of each", got)
	}
}

func TestWindowAllowsMoreOfAnAggregate(t *testing.T) {
	p := newTestPublisher(t, func(c *Config) { c.AggregateWindow = 2 })
	p.Publish(sameAggregate(5))
	p.accept()
	if got := seqs(p.ready); len(got) != 2 {
		t.Errorf("ready = %v, want two", got)
	}
}

func TestEventsBehindAFailedOneAreReleased(t *testing.T) {
	p := newTestPublisher(t, nil)
	events := sameAggregate(3)
	p.Publish(events)
	p.accept()
	p.ready = nil
	p.resolve(Result{Event: events[0], Outcome: Returned})
	got := p.outcomes()
	if got[1] != Returned || got[2] != Released || got[3] != Released || len(p.ready) != 0 {
		t.Errorf("outcomes = %v, ready = %v; want the followers released", got, seqs(p.ready))
	}
}

// Whoever publishes learns of a failure only when it takes the result. What it had handed over by
// then must not overtake the failed event.
func TestFollowerHandedOverBeforeTheFailureWasTakenIsReleased(t *testing.T) {
	for _, outcome := range []Outcome{Returned, Late, Unknown, Released} {
		p := newTestPublisher(t, nil)
		events := sameAggregate(3)
		p.Publish(events[:1])
		p.accept()
		p.ready = nil
		p.resolve(Result{Event: events[0], Outcome: outcome})
		p.deliver()
		p.Publish(events[1:2]) // claimed before the failure was known
		p.accept()
		if len(p.ready) != 0 {
			t.Fatalf("%v: a follower was lined up: %v", outcome, seqs(p.ready))
		}
		if got := p.outcomes(); got[1] != outcome || got[2] != Released {
			t.Fatalf("%v: outcomes = %v, want the follower released", outcome, got)
		}
		p.Publish(events[2:]) // by somebody who knows
		p.accept()
		if got := seqs(p.ready); len(got) != 1 || got[0] != 3 {
			t.Errorf("%v: ready = %v after the failure was taken, want the event handed over since", outcome, got)
		}
	}
}

func TestChainsAreForgottenWhenNothingIsLeft(t *testing.T) {
	p := newTestPublisher(t, nil)
	events := eventsUpTo(9)
	p.Publish(events)
	p.accept()
	for len(p.ready) > 0 {
		e := p.ready[0]
		p.ready = p.ready[1:]
		o := Confirmed
		if e.Seq == 4 {
			o = Nacked
		}
		p.resolve(Result{Event: e, Outcome: o})
	}
	if got := p.outcomes(); len(got) != 9 {
		t.Errorf("outcomes = %v, want one for each", got)
	}
	p.accept()
	if len(p.chains) != 0 {
		t.Errorf("chains left: %d", len(p.chains))
	}
}

// What a queue never confirms must leave room for the events of others.
func TestLateEventsAreForgottenWhenTheyAreMany(t *testing.T) {
	p := newTestPublisher(t, func(c *Config) { c.ConfirmTimeout, c.Ordering = 5*time.Second, orderingNone })
	p.Publish(eventsUpTo(30))
	p.accept()
	s := &amqpSession{clock: newPausableClock(), heard: 20 * time.Second, maxInFlight: 20}
	s.clock.start = s.clock.start.Add(-20 * time.Second)
	for _, e := range p.ready {
		p.flights = append(p.flights, &flight{event: e, sent: time.Second})
	}
	p.ready = nil
	if err := p.expire(s); err != nil {
		t.Fatal(err)
	}
	if len(p.late) != 10 || p.late[9].event.Seq != 30 {
		t.Errorf("late = %d flights, want the last 10 that were sent", len(p.late))
	}
}

func TestRecallGivesBackWhatWasNotWritten(t *testing.T) {
	p := newTestPublisher(t, nil)
	events := sameAggregate(3)
	p.Publish(events)
	p.accept()
	p.ready = nil // the first was written
	p.Recall()
	p.accept()
	if got := p.outcomes(); len(got) != 2 || got[2] != Released || got[3] != Released {
		t.Errorf("outcomes = %v, want the second and third released", got)
	}
	p.resolve(Result{Event: events[0], Outcome: Confirmed})
	if got := p.outcomes(); got[1] != Confirmed || len(got) != 1 {
		t.Errorf("outcomes = %v, want the first confirmed", got)
	}
}

// A broker that accepts connections and then says nothing, as one that hangs does, must not keep
// the events: pause and shutdown wait for them.
func TestEventsHandedOverWhileTheBrokerHangsAreGivenBack(t *testing.T) {
	mute, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer mute.Close()
	p := newTestPublisher(t, func(c *Config) { c.AMQPURL = "amqp://" + mute.Addr().String() })
	ctx, cancel := context.WithCancel(t.Context())
	var running sync.WaitGroup
	running.Go(func() { p.Run(ctx) })
	defer running.Wait()
	defer cancel()
	conn, err := mute.Accept()
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()

	p.Publish(sameAggregate(3))
	inTime := time.After(amqpSetupTimeout / 2)
	for released := 0; released < 3; {
		select {
		case <-p.bell:
		case <-inTime:
			t.Fatalf("%d of 3 events came back in half the time of an attempt to connect", released)
		}
		results, _ := p.Take()
		for _, r := range results {
			if r.Outcome != Released {
				t.Errorf("event %d: %v, want it released", r.Event.Seq, r.Outcome)
			}
			released++
		}
	}
}

func TestUnorderedEventsAllGoOutAtOnce(t *testing.T) {
	p := newTestPublisher(t, func(c *Config) { c.Ordering = orderingNone })
	events := sameAggregate(5)
	p.Publish(events)
	p.accept()
	if len(p.ready) != 5 {
		t.Errorf("ready = %v, want all", seqs(p.ready))
	}
	p.ready = nil
	p.resolve(Result{Event: events[0], Outcome: Returned})
	if got := p.outcomes(); len(got) != 1 {
		t.Errorf("outcomes = %v, want the failed one alone", got)
	}
}

func TestEventThatClosedItsChannelGoesAlone(t *testing.T) {
	p := newTestPublisher(t, nil)
	e := eventNumber(1)
	e.Isolate = true
	p.Publish([]*Event{e, eventNumber(2)})
	p.accept()
	if len(p.solo) != 1 || p.solo[0] != e || len(p.ready) != 1 {
		t.Errorf("solo = %v, ready = %v; want it apart from its neighbour", seqs(p.solo), seqs(p.ready))
	}
}

// A confirm that is missing is late if the broker still works, and lost with the session if it does
// not. The event was sent at 1 s, so half of its time is over at 3.5 s, and it is due at 6 s.
func TestMissingConfirmIsLateOnlyIfTheBrokerAnswers(t *testing.T) {
	tests := []struct {
		name         string
		now          time.Duration
		heard, asked time.Duration // asked is 0 where nothing was
		answers      bool          // the broker has answered, with
		answer       error
		want         error
		late, asks   bool
	}{
		{name: "there is time", now: 3 * time.Second},
		{name: "half of the time is over", now: 4 * time.Second, heard: 2 * time.Second, asks: true},
		{name: "others were confirmed", now: 4 * time.Second, heard: 3600 * time.Millisecond},
		{name: "others were confirmed, and it is due", now: 7 * time.Second, heard: 3600 * time.Millisecond, late: true},
		{name: "the broker answered", now: 7 * time.Second, heard: 2 * time.Second, asked: 4 * time.Second, answers: true, late: true},
		{name: "the answer is awaited", now: 5 * time.Second, heard: 2 * time.Second, asked: 4 * time.Second},
		{name: "the answer did not come", now: 7 * time.Second, heard: 2 * time.Second, asked: 4 * time.Second, want: errBrokerMute},
		{name: "the answer is that all is over", now: 5 * time.Second, asked: 4 * time.Second, answers: true, answer: amqp.ErrClosed, want: amqp.ErrClosed},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			p := newTestPublisher(t, func(c *Config) { c.ConfirmTimeout = 5 * time.Second })
			p.Publish(eventsUpTo(1))
			p.accept()
			p.flights = []*flight{{event: p.ready[0], sent: time.Second}}
			p.ready = nil
			s := &amqpSession{clock: newPausableClock(), heard: tt.heard, asked: tt.asked, maxInFlight: 10, question: func() error { return nil }}
			s.clock.start = s.clock.start.Add(-tt.now)
			if tt.asked > 0 {
				s.reply = make(chan error, 1)
			}
			if tt.answers {
				s.reply <- tt.answer
			}
			err := s.answered()
			if err == nil {
				err = p.expire(s)
			}
			if !errors.Is(err, tt.want) {
				t.Errorf("error %v, want %v", err, tt.want)
			}
			if _, reported := p.outcomes()[1]; reported != tt.late {
				t.Errorf("reported = %v, want %v", reported, tt.late)
			}
			if late := len(p.late) == 1; late != tt.late {
				t.Errorf("late = %v, want %v", late, tt.late)
			}
			if asks := s.asked >= tt.now-time.Millisecond; asks != tt.asks {
				t.Errorf("asks = %v, want %v", asks, tt.asks)
			}
			s.watcher.Wait()
		})
	}
}
