package main

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"sync"
	"time"

	"github.com/cenkalti/backoff/v5"
)

const (
	// beatInterval is how often the working session proves itself while there is nothing to do,
	// and how often a standby tries to take over.
	beatInterval = time.Second
	// probeInterval is how often LISTEN is proved to work, and probePatience how long a probe may take.
	probeInterval = 30 * time.Second
	probePatience = 2 * time.Second
	// settleReserve is the part of SHUTDOWN_TIMEOUT kept for the last settle and the goodbyes.
	settleReserve = 2 * time.Second
	// restartMin and restartMax bound the pause between working sessions.
	restartMin = 100 * time.Millisecond
	restartMax = 500 * time.Millisecond
)

// Names of the health checks.
const (
	checkPostgres = "postgres"
	checkRabbitMQ = "rabbitmq"
	checkRelay    = "relay"
)

// Values of ORDERING and ON_DEAD_LETTER.
const (
	orderingAggregate = "aggregate"
	orderingNone      = "none"
	onDeadLetterHold  = "hold"
)

// errPaused is what readiness says while an operator keeps the outbox paused.
var errPaused = errors.New("paused by an operator")

// errShutdownOverrun: what was in flight did not end within SHUTDOWN_TIMEOUT.
var errShutdownOverrun = errors.New("events were still in flight when SHUTDOWN_TIMEOUT passed; they are sent again by the next relay")

// Publisher sends events and says what became of each. Its methods do not block.
type Publisher interface {
	Publish(events []*Event)
	Recall()                // gives back what was not written, as Released
	Take() ([]Result, Link) // what became of events since the last call, and the state of the link
}

// Session is the working session in the database; see WorkingSession. Any error ends it.
type Session interface {
	Lead(name string, again bool) (led bool, deaths int, err error)
	Holder() (Holder, error)
	Claim(ClaimQuery) (Claim, error)
	Settle(Settlement) (Settled, error)
	Suspect(q ClaimQuery, noted map[string]bool) (e *Event, deaths int, err error)
	Acquit(id string) error
	AcquitAll() error
	Keep() (bool, error)
	TryDoorbell() (bool, error)
	ReleaseDoorbell() error
	Beat() (paused bool, err error)
	Show(flag Flag, up bool) error
	NoteError(text string) error
	Probe(channel string) error
	CallOthers() error
	Table() uint32
	ClockAhead() time.Duration
	End() error
	Discard()
}

// Ears is what the relay needs of the listener.
type Ears interface {
	ProbeChannel() string
	Heard() time.Time
	Rings() uint64
	Reconnect()
	Heed(table uint32) // of all notifications, only those that are about this table
}

// Relay moves events from the outbox to the broker: wake, claim, publish, confirm, settle, and
// again while there is more. One goroutine, in Run, owns all of it; what others have to say
// comes by bells.
//
// Claims overlap with publishing: while half a batch waits for its confirms the next is
// claimed. Settling waits until half of what is out is done, so that commits are shared.
type Relay struct {
	cfg       Config
	name      string // of this relay, for people
	connect   func(context.Context) (Session, error)
	publisher Publisher
	ears      Ears
	health    *Health
	metrics   *Metrics
	log       *slog.Logger

	notified    Bell // a notification came
	reconnected Bell // notifications may have been missed
	news        Bell // the publisher has results

	session Session
	// What was claimed and is not settled outlives a session: the publisher has it.
	hand      map[string]*held
	handBytes int64
	inFlight  int            // with the publisher
	done      []Result       // to be settled
	doneSince time.Time      // when the first of done came
	failures  int            // of done
	lates     map[string]int // by id: how often it was late since a confirm or failure of it
	locked    []Result       // could not be settled: another session has the row locked
	released  int64          // how often dead letters were retried or discarded, by the last claim

	tenure
	connected bool            // there was a session before
	led       bool            // worked before, or may have
	suspects  int             // events still to be taken one by one
	noted     map[string]bool // ids of suspects that this relay has noted and not acquitted
	deaths    int             // of leaders before us that are not forgotten yet
	link      Link
	due       bool      // there may be events
	limit     int       // of rows for the next claim
	deadline  time.Time // of the shutdown; zero while running
	trouble   string    // as last written down
	lost      string    // why the last session ended, to be written down
}

// tenure is what the relay knows by one session, and forgets with it.
type tenure struct {
	since     time.Time // when the work lock was had
	keeper    bool      // we keep the doorbell
	doorbell  doorbell
	low       lowWater
	look      look
	open      bool      // a batch of an unordered outbox holds row locks
	leased    time.Time // when the lease of events in flight, of which the locks are gone, was last renewed
	nextRetry time.Time // when a failed event is due; zero for none
	paused    bool
	listen    listenProof
	called    time.Time     // when relays beside us were last called
	shown     map[Flag]bool // the flags that are up
}

func newTenure() tenure { return tenure{low: newLowWater(), shown: make(map[Flag]bool)} }

// held is an event in hand.
type held struct {
	event   *Event
	claimed time.Time
}

// runRelay connects the parts of the relay and works until ctx is done, then finishes what is in
// flight within SHUTDOWN_TIMEOUT. errShutdownOverrun says that this was not enough.
func runRelay(ctx context.Context, cfg Config, log *slog.Logger, m *Metrics, h *Health) error {
	notified, reconnected, news := NewBell(), NewBell(), NewBell()
	store := NewStore(cfg)
	publisher, err := NewAMQPPublisher(cfg, log, m, news, store.Leased)
	if err != nil {
		return err
	}
	listener := NewListener(cfg, log, m, notified, reconnected)
	backlog := NewBacklog(cfg, log, m)
	retention, err := NewRetention(cfg, log, m, store.Leased)
	if err != nil {
		return err
	}
	host, _ := os.Hostname() // for people only
	relay := &Relay{
		cfg: cfg, name: fmt.Sprintf("%s, pid %d, run %.8s", host, os.Getpid(), rand.Text()),
		connect:   func(ctx context.Context) (Session, error) { return store.Open(ctx) },
		publisher: publisher, ears: listener, health: h, metrics: m, log: log,
		notified: notified, reconnected: reconnected, news: news,
	}

	// The others serve the relay until it has ended, so the signal does not reach them.
	serving, stop := context.WithCancel(context.WithoutCancel(ctx))
	defer stop()
	ctx, fail := context.WithCancelCause(ctx)
	defer fail(nil)
	var wg, aside sync.WaitGroup // those of aside have nothing in hand
	serve := func(wg *sync.WaitGroup, run func(context.Context)) {
		wg.Go(func() {
			if err := recovered(func() error { run(serving); return nil }); err != nil {
				fail(err)
			}
		})
	}
	serve(&wg, publisher.Run)
	serve(&wg, listener.Run)
	serve(&aside, backlog.Run)
	serve(&aside, retention.Run)
	err = relay.Run(ctx)
	stop()
	wg.Wait()
	waitAtMost(&aside, time.Second)
	if cause := context.Cause(ctx); errors.Is(cause, errPanic) {
		err = errors.Join(cause, err)
	}
	return err
}

// waitAtMost leaves goroutines behind that do not end in time: one may be held in a call to a
// database that does not answer.
func waitAtMost(wg *sync.WaitGroup, d time.Duration) {
	done := make(chan struct{})
	go func() {
		wg.Wait()
		close(done)
	}()
	select {
	case <-done:
	case <-time.After(d):
	}
}

// Run works until ctx is done, then finishes what is in flight within SHUTDOWN_TIMEOUT. It
// returns nil after an end in order, errShutdownOverrun, or an error that no restart mends.
func (r *Relay) Run(ctx context.Context) error {
	r.hand, r.limit = make(map[string]*held), r.cfg.BatchSize
	r.noted, r.lates = make(map[string]bool), make(map[string]int)
	pause := backoff.NewExponentialBackOff()
	pause.InitialInterval, pause.MaxInterval = restartMin, restartMax
	failures := &repeatLog{log: r.log.With(keyServer, PeerPostgres), what: "work the outbox"}
	for {
		began := time.Now()
		err := r.workOnce(ctx, func() { failures.OK() })
		r.metrics.EndTenure()
		switch {
		case err == nil, errors.Is(err, errPooler), errors.Is(err, errShutdownOverrun):
			return err
		case ctx.Err() != nil:
			r.beginStop()
			if len(r.hand) == 0 {
				return nil
			}
			if !time.Now().Before(r.deadline) {
				return errShutdownOverrun
			}
		}
		r.publisher.Recall() // without the locks nothing more may be written
		err = explained(err)
		r.health.Set(checkPostgres, err)
		r.metrics.ConnectionFailures[PeerPostgres].Inc()
		failures.Failed(err)
		r.lost = checkPostgres + ": " + err.Error()
		if time.Since(began) > 10*restartMax {
			pause.Reset()
		}
		if ctx.Err() == nil {
			sleep(ctx, pause.NextBackOff())
		} else { // what was confirmed is to be marked yet
			sleep(context.WithoutCancel(ctx), restartMin)
		}
	}
}

// beginStop starts the shutdown, once: nothing more is claimed, what was not written comes back,
// and the rest has until the deadline.
func (r *Relay) beginStop() {
	if r.deadline.IsZero() {
		r.deadline = time.Now().Add(max(r.cfg.ShutdownTimeout-settleReserve, r.cfg.ShutdownTimeout/2))
		r.publisher.Recall()
	}
}

// workOnce opens a working session, waits for the work lock, and works until the session is
// lost or, which it reports by nil, the relay ended in order.
func (r *Relay) workOnce(ctx context.Context, onWorking func()) error {
	r.session, r.tenure = nil, newTenure()
	connecting := ctx
	if !r.deadline.IsZero() {
		var cancel context.CancelFunc
		connecting, cancel = context.WithDeadline(context.WithoutCancel(ctx), r.deadline)
		defer cancel()
	}
	session, err := r.connect(connecting)
	if err != nil {
		return err
	}
	r.session = session
	defer session.Discard()
	r.ears.Heed(session.Table())
	set01(r.metrics.Connected[PeerPostgres], true)
	if r.connected {
		r.metrics.Reconnects[PeerPostgres].Inc()
	}
	r.connected = true
	r.health.Set(checkPostgres, nil)
	onWorking()
	if err := r.showFlags(); err != nil {
		return err
	}
	if led, err := r.lead(ctx); !led {
		return err
	}
	if err := r.work(ctx); err != nil {
		return err
	}
	return session.End()
}

// lead waits until the work lock is had. It returns false and nil when ctx ended first.
func (r *Relay) lead(ctx context.Context) (bool, error) {
	var known Holder
	for {
		led, deaths, err := r.session.Lead(r.name, r.led)
		r.led = r.led || led || err != nil // which may have come after it was noted
		if led || err != nil {
			if led {
				r.suspect(deaths)
				r.log.Info("working the outbox", "relay", r.name)
				r.health.Set(checkRelay, nil)
				set01(r.metrics.Leader, true)
			}
			return led, err
		}
		holder, err := r.session.Holder()
		if err != nil {
			return false, err
		}
		if holder != known && holder != (Holder{}) {
			known = holder
			if holder.MayBeRelay {
				// A standby could take over, so it is ready: a rolling deploy waits for that.
				if theirs := holder.ordering(); theirs == r.cfg.Ordering {
					r.log.Info("standing by: another relay works the outbox", "holder", holder.String())
				} else {
					r.log.Warn("standing by: a relay with another ORDERING works the outbox, and the two kinds exclude each other",
						"ordering", r.cfg.Ordering, "holder", holder.String(), "holder_ordering", theirs)
				}
				r.health.Set(checkRelay, nil)
			} else {
				r.log.Error("the work lock is held by a session that does not look like a relay", "holder", holder.String())
				r.health.Set(checkRelay, fmt.Errorf("the work lock is held by no relay but by %s", holder))
			}
		}
		r.publisherNews()                  // the link's state, for readiness
		if len(r.done)+len(r.locked) > 0 { // of the time before: what was confirmed is so whoever works now
			if err := r.settleAll(); err != nil {
				return false, err
			}
		}
		if err := r.showFlags(); err != nil {
			return false, err
		}
		switch {
		case ctx.Err() == nil:
			sleep(ctx, beatInterval)
			continue
		case len(r.hand) == 0:
			return false, nil
		}
		r.beginStop()
		if !time.Now().Before(r.deadline) {
			return false, errShutdownOverrun
		}
		sleep(context.WithoutCancel(ctx), restartMin)
	}
}

// work runs the loop under the work lock.
func (r *Relay) work(ctx context.Context) error {
	r.since = time.Now()
	r.wake(CauseStart)
	r.look.begin()
	var err error
	if r.keeper, err = r.session.Keep(); err != nil {
		return err
	}
	if err := r.obey(); err != nil { // before anything is claimed
		return err
	}
	timers := newTimers(r.cfg.FallbackInterval)
	defer timers.stop()
	for {
		r.publisherNews()
		if ctx.Err() != nil {
			r.beginStop()
		}
		stopping := !r.deadline.IsZero()
		able := r.link.Up && r.link.Blocked == "" && !r.paused && !stopping
		var err error
		switch {
		case r.mustSettle():
			err = r.settle()
		case r.mustLease():
			err = r.lease()
		case able && r.due && r.room():
			err = r.claim()
		case r.maySettle():
			err = r.settle()
		case stopping && r.inFlight == 0 && len(r.locked) == 0: // the beat tries locked rows again
			return nil
		case stopping && !time.Now().Before(r.deadline):
			return errShutdownOverrun
		default:
			var polled bool
			if polled, err = r.tendDoorbell(able); err == nil && !polled {
				err = r.wait(ctx, timers)
			}
		}
		if err != nil {
			return err
		}
	}
}

// wake makes the relay look for events.
func (r *Relay) wake(cause Cause) {
	r.due = true
	r.metrics.Wakeups[cause].Inc()
}

// publisherNews takes in what the publisher has to say.
func (r *Relay) publisherNews() {
	results, link := r.publisher.Take()
	for _, res := range results {
		r.take(res)
	}
	if link != r.link {
		if link.Up && link.Blocked == "" { // whatever was missed meanwhile is looked for
			r.wake(CauseReconnect)
			r.look.begin()
		}
		r.link = link
	}
	r.health.Set(checkRabbitMQ, linkTrouble(link))
	r.metrics.InFlight.Set(float64(r.inFlight))
}

// linkTrouble says why nothing can be published; nil when it can.
func linkTrouble(l Link) error {
	switch {
	case l.Blocked != "":
		return fmt.Errorf("blocked by the broker: %s", l.Blocked)
	case l.Err != nil:
		return l.Err
	case l.Up:
		return nil
	default:
		return errStarting
	}
}
