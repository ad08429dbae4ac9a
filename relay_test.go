package main

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/testutil"
)

var _ Session = (*fakeSession)(nil)

// fakeSession is a working session over rows in memory. All of it is used by the relay's
// goroutine; tests look at it while the bubble stands still.
type fakeSession struct {
	pending   []*Event
	claims    []ClaimQuery
	settled   []Settlement
	ringing   bool // the doorbell lock is held
	refuse    int  // how often sleep is refused
	released  int
	failOn    string // operation that fails
	locked    []string
	ended     bool
	paused    bool
	deaths    int            // of leaders before
	suspicion map[string]int // deaths with this event in hand
	noted     []string
	flags     map[Flag]bool
	errors    []string // written down
	decided   int64    // how often a person decided about dead letters
	takes     struct{ claim, settle, flush time.Duration }
	called    int  // other relays
	standby   bool // somebody else has the work lock
	baton     *baton
}

func (s *fakeSession) fail(op string) error {
	s.baton.pass()
	if s.failOn == op {
		return errors.New(op + " failed")
	}
	return nil
}

func (s *fakeSession) Lead(string, bool) (bool, int, error) {
	return !s.standby, s.deaths, s.fail("lead")
}
func (s *fakeSession) Acquit(string) error { return s.fail("acquit") }
func (s *fakeSession) AcquitAll() error    { s.noted = nil; return s.fail("acquit all") }

func (s *fakeSession) Suspect(q ClaimQuery, _ map[string]bool) (*Event, int, error) {
	for _, e := range s.pending {
		if !slices.Contains(q.InHand, e.ID) {
			s.noted = append(s.noted, e.ID)
			return e, s.suspicion[e.ID] + 1, s.fail("suspect")
		}
	}
	return nil, 0, s.fail("suspect")
}
func (s *fakeSession) Holder() (Holder, error) { return Holder{}, nil }
func (s *fakeSession) Keep() (bool, error)     { return true, nil }
func (s *fakeSession) Beat() (bool, error) {
	err := s.fail("beat")
	return s.paused, err
}

func (s *fakeSession) Show(f Flag, up bool) error {
	if s.flags[f] == up {
		return fmt.Errorf("flag %d is %v already", f, up)
	}
	s.flags[f] = up
	return s.fail("show")
}

func (s *fakeSession) NoteError(text string) error {
	s.errors = append(s.errors, text)
	return s.fail("note error")
}
func (s *fakeSession) Probe(string) error        { return nil }
func (s *fakeSession) CallOthers() error         { s.called++; return nil }
func (s *fakeSession) Table() uint32             { return 1 }
func (s *fakeSession) ClockAhead() time.Duration { return 0 }
func (s *fakeSession) End() error                { s.ended = true; return nil }
func (s *fakeSession) Discard()                  {}
func (s *fakeSession) ReleaseDoorbell() error    { s.ringing = false; s.released++; return nil }
func (s *fakeSession) TryDoorbell() (bool, error) {
	s.baton.pass()
	s.refuse--
	s.ringing = s.refuse < 0
	return s.ringing, nil
}

func (s *fakeSession) lasts(d time.Duration) {
	time.Sleep(d)
	s.baton.pass()
}

func (s *fakeSession) Claim(q ClaimQuery) (Claim, error) {
	s.claims = append(s.claims, q)
	s.lasts(s.takes.claim)
	c := Claim{Xmin: 1, Xmax: 1, Released: s.decided}
	for _, e := range s.pending {
		if e.Seq <= q.Mark || slices.Contains(q.InHand, e.ID) {
			continue
		}
		if len(c.Events) == q.Limit {
			c.More = true
			break
		}
		c.Events = append(c.Events, e)
		c.Seen = e.Seq
	}
	return c, s.fail("claim")
}

func (s *fakeSession) Settle(st Settlement) (Settled, error) {
	if err := s.fail("settle"); err != nil {
		return Settled{}, err
	}
	s.settled = append(s.settled, st)
	s.lasts(s.takes.settle)
	if st.Flush {
		s.lasts(s.takes.flush)
	}
	done := func(e *Event) bool {
		return slices.Contains(st.Confirmed, e) || slices.ContainsFunc(st.Failed, func(f Failure) bool { return f.Event == e })
	}
	s.pending = slices.DeleteFunc(s.pending, func(e *Event) bool { return done(e) && !slices.Contains(s.locked, e.ID) })
	return Settled{Changed: len(st.Confirmed) + len(st.Failed) - len(s.locked), Locked: s.locked}, nil
}

// fakePublisher answers each event with outcome, at once unless it is held.
type fakePublisher struct {
	link    Link
	outcome func(*Event) Outcome
	held    bool
	waiting []*Event
	got     [][]*Event
	results []Result
	recalls int
	news    Bell
	baton   *baton
}

// baton tells the race detector what synctest does not: that what the test did before it stood
// still happened before what the relay does next.
type baton struct{ mu sync.Mutex }

func (b *baton) pass() {
	b.mu.Lock()
	defer b.mu.Unlock()
}

func (p *fakePublisher) Publish(events []*Event) {
	p.got = append(p.got, events)
	p.waiting = append(p.waiting, events...)
	if !p.held {
		p.answer()
	}
}

func (p *fakePublisher) answer() {
	for _, e := range p.waiting {
		o := Confirmed
		if p.outcome != nil {
			o = p.outcome(e)
		}
		p.results = append(p.results, Result{Event: e, Outcome: o, Reason: "because"})
	}
	p.waiting = nil
	p.news.Ring()
}

func (p *fakePublisher) Recall() { p.recalls++ }
func (p *fakePublisher) Take() ([]Result, Link) {
	p.baton.pass()
	r := p.results
	p.results = nil
	return r, p.link
}

type fakeEars struct{ rings uint64 }

func (*fakeEars) ProbeChannel() string { return "probe" }
func (e *fakeEars) Rings() uint64      { return e.rings }
func (*fakeEars) Heard() time.Time     { return time.Now() }
func (*fakeEars) Reconnect()           {}
func (*fakeEars) Heed(uint32)          {}

// rig is a relay with fakes around it.
type rig struct {
	*Relay
	session   *fakeSession
	publisher *fakePublisher
	hears     *fakeEars
	wrote     int // events, of write
	stop      context.CancelFunc
	err       error
	ended     bool
}

func testConfig() Config {
	return Config{
		Ordering: orderingAggregate, AggregateWindow: 1, FallbackInterval: 5 * time.Second, BatchSize: 10,
		BatchBytes: 1 << 20, MaxAttempts: 3, RetryBase: time.Second, RetryMax: time.Minute, DeadAfter: time.Hour,
		ConfirmTimeout: 5 * time.Second, ShutdownTimeout: 8 * time.Second,
	}
}

// newRig starts a relay in the test's bubble; change alters it before.
func newRig(t *testing.T, change func(*rig)) *rig {
	t.Helper()
	news := NewBell()
	b := new(baton)
	r := &rig{session: &fakeSession{baton: b}, publisher: &fakePublisher{link: Link{Up: true}, news: news, baton: b}, hears: new(fakeEars)}
	r.Relay = &Relay{
		cfg: testConfig(), name: "test", ears: r.hears, publisher: r.publisher,
		connect: func(context.Context) (Session, error) {
			r.publisher.baton.pass()
			r.session.flags = make(map[Flag]bool) // those of the session before ended with it
			return r.session, nil
		},
		health: newHealth(checkPostgres, checkRabbitMQ, checkRelay), metrics: newMetrics(prometheus.NewRegistry()),
		log: slog.New(slog.DiscardHandler), notified: NewBell(), reconnected: NewBell(), news: news,
	}
	if change != nil {
		change(r)
	}
	ctx, stop := context.WithCancel(t.Context())
	r.stop = stop
	go func() {
		r.err = r.Run(ctx)
		r.ended = true
	}()
	synctest.Wait()
	return r
}

// step lets d of fake time pass and waits until the relay waits.
func (r *rig) step(d time.Duration) {
	r.publisher.baton.pass()
	time.Sleep(d)
	synctest.Wait()
}

func eventNumber(n int) *Event {
	return &Event{
		ID: fmt.Sprintf("00000000-0000-0000-0000-%012d", n), Seq: int64(n), AggregateType: "order",
		AggregateID: fmt.Sprint(n % 3), EventType: "order.created", Payload: []byte("{}"), CreatedAt: time.Now(),
	}
}

func eventsUpTo(n int) (events []*Event) {
	for i := range n {
		events = append(events, eventNumber(i+1))
	}
	return events
}

func TestRelayLooksForEventsWithoutANotification(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t, nil)
		before := len(r.session.claims)
		r.step(12 * time.Second)
		r.stop()
		r.step(0)
		if got := len(r.session.claims) - before; got != 2 {
			t.Errorf("claims in 12s = %d, want 2 (at 5s and 10s)", got)
		}
	})
}

func TestRelayLooksOnceMoreAfterItHasTheDoorbell(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t, nil)
		if !r.session.ringing {
			t.Error("asleep without the doorbell lock")
		}
		if n := len(r.session.claims); n != 2 || r.session.claims[1].Mark != -1 {
			t.Errorf("claims = %+v, want one before and a full one after the lock was had", r.session.claims)
		}
		r.stop()
		r.step(0)
	})
}

func TestRelayPollsWhileSleepIsRefused(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t, func(r *rig) { r.session.refuse = 30 })
		r.step(300 * time.Millisecond)
		polls := len(r.session.claims)
		if polls < 10 {
			t.Errorf("claims while a silent writer was in its transaction = %d, want one every 20ms at least", polls)
		}
		r.step(time.Second)
		if !r.session.ringing {
			t.Error("the writer is gone and the relay still does not sleep")
		}
		r.stop()
		r.step(0)
	})
}

// sent is how often the event with this seq was handed to the publisher.
func (r *rig) sent(seq int64) (n int) {
	for _, batch := range r.publisher.got {
		for _, e := range batch {
			if e.Seq == seq {
				n++
			}
		}
	}
	return n
}

// write commits n events, one every interval, and rings for each as a trigger does.
func (r *rig) write(n int, interval time.Duration) {
	for range n {
		r.wrote++
		r.session.pending = append(r.session.pending, eventNumber(100+r.wrote))
		if r.session.ringing {
			r.hears.rings++
			r.notified.Ring()
		}
		r.step(interval)
	}
}

func TestRelayTellsManyWritersToBeSilentAndPollsOnTime(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t, func(r *rig) {
			r.session.takes.claim, r.session.takes.settle, r.session.takes.flush = 300*time.Microsecond, 300*time.Microsecond, time.Millisecond
		})
		r.write(100, 10*time.Millisecond)
		if !r.session.ringing {
			t.Error("100 commits a second of 1 ms each were told to be silent")
		}
		r.write(500, time.Millisecond)
		if r.session.ringing {
			t.Error("1,000 commits a second of 1 ms each still notify")
		}
		before := len(r.session.claims)
		r.write(100, time.Millisecond)
		if n := len(r.session.claims) - before; n < 60 {
			t.Errorf("polls in 100 ms = %d, want one every millisecond, or as often as claim and settle allow", n)
		}
		r.write(100, 50*time.Millisecond)
		if !r.session.ringing {
			t.Error("20 commits a second are still silent")
		}
		flushes := 0
		for _, s := range r.session.settled {
			if s.Flush {
				flushes++
			}
		}
		if flushes < 3 || flushes > 12 {
			t.Errorf("%d of %d settles waited for the disk in 7 s, want about one a second", flushes, len(r.session.settled))
		}
		r.stop()
		r.step(10 * time.Millisecond)
	})
}

func TestRelayDrainsABacklogWithoutPause(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		began := time.Now()
		r := newRig(t, func(r *rig) { r.session.pending = eventsUpTo(95) })
		if n := len(r.session.pending); n != 0 {
			t.Errorf("pending = %d, want 0", n)
		}
		if took := time.Since(began); took != 0 {
			t.Errorf("took %v of fake time, want none: nothing was there to wait for", took)
		}
		r.stop()
		r.step(0)
	})
}

func TestRelayBoundsWhatIsInHand(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t, func(r *rig) {
			r.session.pending = eventsUpTo(95)
			r.publisher.held = true
		})
		if n := len(r.hand); n > 15 {
			t.Errorf("events in hand = %d, want at most one and a half batches of 10", n)
		}
		r.publisher.held = false
		r.publisher.answer()
		r.step(0)
		if n := len(r.session.pending); n != 0 {
			t.Errorf("pending = %d after the broker answered, want 0", n)
		}
		r.stop()
		r.step(0)
	})
}

func TestFailureIsSettledBeforeTheNextClaim(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var order []string
		r := newRig(t, func(r *rig) {
			r.session.pending = eventsUpTo(25)
			r.publisher.outcome = func(e *Event) Outcome {
				if e.Seq == 3 {
					return Returned
				}
				return Confirmed
			}
		})
		for _, s := range r.session.settled {
			for _, f := range s.Failed {
				order = append(order, f.Event.ID)
				if f.Attempts != 1 || f.Dead {
					t.Errorf("failure = %+v, want its first attempt and no dead letter", f)
				}
			}
		}
		if len(order) != 1 {
			t.Errorf("failures settled = %v, want one", order)
		}
		if got := testutil.ToFloat64(r.metrics.Outcomes[Returned]); got != 1 {
			t.Errorf("returned = %v, want 1", got)
		}
		r.stop()
		r.step(0)
	})
}

// Where confirms are slow and events keep coming, what is confirmed is never half of what is out.
func TestConfirmedEventsAreMarkedWhileOthersAreUnderWay(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t, func(r *rig) {
			r.session.pending = eventsUpTo(6)
			r.publisher.held = true
		})
		others := r.publisher.waiting[1:]
		r.publisher.waiting = r.publisher.waiting[:1]
		r.publisher.answer()
		r.step(time.Second)
		if n := len(r.session.pending); n != 5 {
			t.Errorf("pending = %d a second after the first of 6 events was confirmed, want 5", n)
		}
		r.publisher.waiting = others
		r.publisher.answer()
		r.stop()
		r.step(10 * time.Second)
		if !r.ended || r.err != nil {
			t.Errorf("ended = %v with %v", r.ended, r.err)
		}
	})
}

func TestOutageCountsNoAttempt(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t, func(r *rig) {
			r.session.pending = eventsUpTo(5)
			r.publisher.outcome = func(*Event) Outcome { return Unknown }
			r.publisher.held = true
		})
		r.publisher.link = Link{Err: errors.New("connection refused")}
		r.publisher.answer()
		r.step(0)
		if len(r.session.settled) != 0 {
			t.Errorf("settled = %+v, want nothing", r.session.settled)
		}
		if r.session.ringing {
			t.Error("writers still ring for a relay that cannot publish")
		}
		if ok, lines := r.health.Ready(); ok {
			t.Errorf("ready during the outage: %v", lines)
		}
		r.publisher.outcome, r.publisher.held, r.publisher.link = nil, false, Link{Up: true}
		r.news.Ring()
		r.step(0)
		if n := len(r.session.pending); n != 0 {
			t.Errorf("pending = %d after the outage, want 0", n)
		}
		if ok, lines := r.health.Ready(); !ok {
			t.Errorf("not ready after the outage: %v", lines)
		}
		r.stop()
		r.step(0)
	})
}

func TestShutdownWaitsForConfirmsAndSettles(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t, func(r *rig) {
			r.session.pending = eventsUpTo(5)
			r.publisher.held = true
		})
		r.stop()
		r.step(time.Second)
		if r.ended || r.publisher.recalls != 1 {
			t.Fatalf("ended = %v, recalls = %d; want it to wait for what is in flight and to take the rest back", r.ended, r.publisher.recalls)
		}
		r.publisher.answer()
		r.step(0)
		if !r.ended || r.err != nil || !r.session.ended || len(r.session.pending) != 0 {
			t.Errorf("ended = %v, err = %v, session ended = %v, pending = %d; want an end in order", r.ended, r.err, r.session.ended, len(r.session.pending))
		}
	})
}

func TestShutdownIsBounded(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t, func(r *rig) {
			r.session.pending = eventsUpTo(5)
			r.publisher.held = true
		})
		r.stop()
		r.step(8 * time.Second)
		if !r.ended || !errors.Is(r.err, errShutdownOverrun) {
			t.Errorf("ended = %v, err = %v; want errShutdownOverrun within SHUTDOWN_TIMEOUT", r.ended, r.err)
		}
	})
}

func TestConfirmedEventIsNotSentAgainWhenItsSessionIsLost(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t, func(r *rig) {
			r.session.pending = eventsUpTo(5)
			r.session.failOn = "settle"
		})
		r.step(3 * time.Second)
		r.session.failOn = ""
		r.step(3 * time.Second)
		sent := 0
		for _, b := range r.publisher.got {
			sent += len(b)
		}
		if sent != 5 || len(r.session.pending) != 0 {
			t.Errorf("sent = %d, pending = %d; want each sent once and marked once the database is back", sent, len(r.session.pending))
		}
		r.stop()
		r.step(0)
	})
}

// Somebody else took the work over meanwhile; that a broker confirmed an event is true all the same.
func TestConfirmedEventIsMarkedWhoeverWorksNow(t *testing.T) {
	for _, stopped := range []bool{false, true} {
		synctest.Test(t, func(t *testing.T) {
			r := newRig(t, func(r *rig) {
				r.session.pending = eventsUpTo(5)
				r.session.failOn = "settle"
			})
			r.session.standby = true
			if r.step(2 * time.Second); len(r.session.pending) != 5 {
				t.Fatalf("pending = %d, want all: the database is out of order", len(r.session.pending))
			}
			if stopped {
				r.stop()
			}
			r.session.failOn = ""
			r.step(3 * time.Second)
			if len(r.session.pending) != 0 || r.ended != stopped || r.err != nil {
				t.Errorf("stopped %v: pending = %d, ended = %v with %v; want all marked", stopped, len(r.session.pending), r.ended, r.err)
			}
			r.stop()
			r.step(2 * time.Second)
		})
	}
}

// A standby's metrics and flags say nothing of the time when it worked.
func TestRelayThatStandsByShowsNothingOfTheTimeBefore(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t, func(r *rig) { r.session.refuse = 1 << 30 })
		r.step(10 * time.Second)
		r.session.paused = true
		r.step(2 * time.Second)
		if testutil.ToFloat64(r.metrics.Paused) != 1 || testutil.ToFloat64(r.metrics.ListenHealthy) != 1 || !r.session.flags[FlagPaused] {
			t.Fatal("it did not pause, or proved nothing")
		}
		r.session.standby, r.session.failOn = true, "beat"
		r.step(2 * time.Second)
		r.session.failOn = ""
		r.step(time.Hour)
		for name, g := range map[string]prometheus.Gauge{
			"outbox_paused": r.metrics.Paused, "outbox_doorbell_refused_seconds": r.metrics.DoorbellRefused,
			"outbox_listen_healthy": r.metrics.ListenHealthy, "outbox_leader": r.metrics.Leader,
		} {
			if v := testutil.ToFloat64(g); v != 0 {
				t.Errorf("%s = %v, want 0", name, v)
			}
		}
		if r.session.flags[FlagPaused] || r.session.flags[FlagListening] || !r.session.flags[FlagRelay] {
			t.Errorf("flags = %v, want that of a relay alone", r.session.flags)
		}
		r.stop()
		r.step(2 * time.Second)
	})
}

func TestLockedRowIsMarkedLaterWithoutSendingAgain(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t, func(r *rig) {
			r.session.pending = eventsUpTo(5)
			r.session.locked = []string{eventNumber(2).ID}
		})
		r.step(6 * time.Second)
		if len(r.session.pending) != 1 {
			t.Fatalf("pending = %d, want the locked one", len(r.session.pending))
		}
		r.write(100, 10*time.Millisecond)
		waits := 0
		for _, s := range r.session.settled {
			if slices.ContainsFunc(s.Confirmed, func(e *Event) bool { return e.Seq == 2 }) && !s.SkipLocked {
				waits++
			}
		}
		if waits != 1 {
			t.Errorf("%d of %d settles waited for the locked row, want the first alone", waits, len(r.session.settled))
		}
		r.session.locked = nil
		r.step(2 * time.Second)
		if len(r.session.pending) != 0 || r.sent(2) != 1 {
			t.Errorf("pending = %d, sent %d times; want it marked and never sent again", len(r.session.pending), r.sent(2))
		}
		r.stop()
		r.step(0)
	})
}

func TestEventThatKillsTheRelayIsSetAside(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t, func(r *rig) {
			r.session.deaths = 4
			r.session.pending = eventsUpTo(5)
			r.session.suspicion = map[string]int{eventNumber(3).ID: fatalDeaths}
		})
		if len(r.session.pending) != 0 {
			t.Errorf("pending = %d, want 0", len(r.session.pending))
		}
		for _, batch := range r.publisher.got {
			if len(batch) != 1 || batch[0].Seq == 3 {
				t.Errorf("published %v, want one by one and never the one that kills", batch)
			}
		}
		r.stop()
		r.step(0)
	})
}

func TestSessionLostWhileSuspicionEndsLeavesNothingInHand(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t, func(r *rig) {
			r.publisher.held = true
			r.session.pending = eventsUpTo(6)
		})
		r.session.failOn, r.session.deaths = "beat", 4 // it takes its own time as a death
		r.step(2 * time.Second)
		r.session.failOn = "acquit"
		r.publisher.answer()
		r.news.Ring()
		r.step(2 * time.Second)
		r.session.failOn, r.publisher.held = "", false
		r.write(2, time.Second)
		r.step(5 * time.Second)
		if len(r.session.pending) != 0 || len(r.hand) != 0 {
			t.Errorf("pending = %d, in hand = %d; want all published and nothing left", len(r.session.pending), len(r.hand))
		}
		r.stop()
		r.step(2 * time.Second)
	})
}

func TestOneDeathMakesNobodySuspicious(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t, func(r *rig) {
			r.session.deaths = 1
			r.session.pending = eventsUpTo(5)
		})
		if len(r.session.noted) != 0 || len(r.publisher.got) != 1 {
			t.Errorf("noted = %v, batches = %d; want full speed", r.session.noted, len(r.publisher.got))
		}
		r.stop()
		r.step(0)
	})
}

func TestPausedRelayClaimsNothing(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t, func(r *rig) {
			r.session.paused = true
			r.session.pending = eventsUpTo(5)
		})
		r.step(2 * time.Second)
		if !r.session.flags[FlagPaused] {
			t.Error("does not show that it obeys")
		}
		r.notified.Ring()
		r.step(10 * time.Second)
		if len(r.publisher.got) != 0 {
			t.Errorf("published while paused: %v", r.publisher.got)
		}
		if ok, _ := r.health.Ready(); ok {
			t.Error("ready while paused")
		}
		r.session.paused = false
		r.notified.Ring()
		r.step(0)
		if len(r.session.pending) != 0 || r.session.flags[FlagPaused] {
			t.Error("did not go on when the pause ended and the bell rang")
		}
		r.stop()
		r.step(0)
	})
}

func TestUnorderedBatchGivesItsLocksUpWhileTheBrokerIsBlocked(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t, func(r *rig) {
			r.cfg.Ordering = orderingNone
			r.session.pending = eventsUpTo(5)
			r.publisher.held = true
		})
		r.publisher.link.Blocked = "low on memory"
		r.news.Ring()
		r.step(2 * time.Second)
		if len(r.session.settled) == 0 || r.open {
			t.Fatal("the transaction is still open while the broker is blocked")
		}
		for _, f := range r.session.settled[0].Failed {
			if f.Attempts != 0 || f.Retry < leaseRenew {
				t.Errorf("lease = %+v, want no attempt counted and other relays kept away", f)
			}
		}
		r.stop()
		r.step(10 * time.Second)
	})
}

func TestUnorderedBatchHasFewEventsThatGoAlone(t *testing.T) {
	events := eventsUpTo(100)
	for i, e := range events {
		e.Isolate = i%2 == 0
	}
	kept := withoutCrowd(events)
	if len(kept) != 50+isolatedMost {
		t.Errorf("%d events, want all 50 good ones and %d that go alone", len(kept), isolatedMost)
	}
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t, func(r *rig) {
			r.cfg.Ordering, r.cfg.BatchSize = orderingNone, 100
			r.session.pending = events
		})
		r.step(0)
		if n := len(r.session.pending); n != 0 {
			t.Errorf("%d events are left over, want the rest to follow in further batches", n)
		}
		r.stop()
		r.step(0)
	})
}

// A dead letter that is retried, and events that it held back, are below the low-water mark by then.
// An event of the aggregate that is new must not be published before them.
func TestReleasedEventsComeBeforeNewOnes(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t, nil)
		r.low.mark = 100
		r.session.pending = []*Event{eventNumber(3), eventNumber(6), eventNumber(150)}
		r.session.decided++
		r.notified.Ring()
		r.step(0)
		r.stop()
		r.step(0)
		var got []int64
		for _, e := range slices.Concat(r.publisher.got...) {
			got = append(got, e.Seq)
		}
		if want := []int64{3, 6, 150}; !slices.Equal(got, want) {
			t.Errorf("published %v, want %v", got, want)
		}
	})
}

func TestRetryDelayDoublesWithinItsBounds(t *testing.T) {
	for n := 1; n < 100; n++ {
		want := time.Minute
		if n <= 6 {
			want = time.Second << (n - 1)
		}
		if d := retryDelay(time.Second, time.Minute, n); d != want {
			t.Errorf("delay after failure %d = %v, want %v", n, d, want)
		}
		r := &Relay{cfg: Config{RetryBase: time.Second, RetryMax: time.Minute, MaxAttempts: 1000}}
		for range 20 {
			f := r.failure(Result{Event: &Event{Attempts: n - 1}, Outcome: Returned})
			if f.Retry > want || f.Retry < want-want/5 {
				t.Fatalf("retry after failure %d = %v, want %v less a fifth at most", n, f.Retry, want)
			}
		}
	}
}

func FuzzRetryDelay(f *testing.F) {
	f.Add(int64(time.Second), int64(time.Minute), 3)
	f.Fuzz(func(t *testing.T, base, longest int64, n int) {
		if base < 1 || longest < base || n < 1 {
			t.Skip("refused by the configuration's check")
		}
		if d := retryDelay(time.Duration(base), time.Duration(longest), n); d < 0 || d > time.Duration(longest) {
			t.Errorf("delay = %v, want between 0 and %v", d, time.Duration(longest))
		}
	})
}
