package main

import (
	"context"
	"time"
)

// timers are those of the relay's loop.
type timers struct {
	beat     *time.Ticker
	fallback *time.Ticker
	wake     *time.Timer // the next retry, poll, or end of patience
}

func newTimers(fallback time.Duration) *timers {
	return &timers{time.NewTicker(beatInterval), time.NewTicker(fallback), time.NewTimer(time.Hour)}
}

func (t *timers) stop() {
	t.beat.Stop()
	t.fallback.Stop()
	t.wake.Stop()
}

// wait sleeps until something happens.
func (r *Relay) wait(ctx context.Context, t *timers) error {
	done := ctx.Done()
	if !r.deadline.IsZero() {
		done = nil // known by now
	}
	at, cause := r.nextWake()
	t.wake.Reset(time.Until(at))
	select {
	case <-done:
	case <-r.news:
	case <-r.notified:
		r.wake(CauseNotify)
		if r.paused { // whoever resumes notifies
			return r.obey()
		}
	case <-r.reconnected:
		r.wake(CauseReconnect)
		r.look.begin()
	case <-t.fallback.C:
		r.wake(CauseFallback)
		if r.look.rested() {
			r.look.begin()
		}
	case <-t.beat.C:
		return r.beat()
	case <-t.wake.C:
		if cause == CauseRetry {
			r.nextRetry = time.Time{} // the claim says when the one after is due
			r.wake(cause)
		}
	}
	return nil
}

// nextWake is when the loop must go on by itself, and what for.
func (r *Relay) nextWake() (time.Time, Cause) {
	at, cause := time.Now().Add(time.Hour), Cause("")
	if !r.deadline.IsZero() {
		at = r.deadline
	}
	if poll := r.doorbell.nextPoll; !poll.IsZero() && poll.Before(at) {
		at, cause = poll, CauseAwake
	}
	if until := r.doneSince.Add(settlePatience); r.cfg.Ordering == orderingAggregate && len(r.done) > 0 && until.Before(at) {
		at, cause = until, "" // to settle
	}
	if !r.nextRetry.IsZero() && r.nextRetry.Before(at) {
		at, cause = r.nextRetry, CauseRetry
	}
	return at, cause
}

// beat proves the session when nothing else did, and sees to what is done once a second.
func (r *Relay) beat() error {
	if len(r.locked) > 0 && !r.open {
		if err := r.settleAll(); err != nil {
			return err
		}
	}
	if err := r.obey(); err != nil {
		return err
	}
	if !r.keeper {
		var err error
		if r.keeper, err = r.session.Keep(); err != nil {
			return err
		}
	}
	if r.deaths > 0 && r.suspects == 0 && time.Since(r.since) > healthyAfter {
		if err := r.trust(); err != nil {
			return err
		}
	}
	if r.look.due() {
		r.due = true
		r.look.begin()
	}
	if err := r.proveListen(); err != nil {
		return err
	}
	if err := r.showFlags(); err != nil {
		return err
	}
	return r.noteTrouble()
}

// obey asks whether the outbox is paused. Paused, nothing is claimed, what was not written comes
// back, and what was is waited for.
func (r *Relay) obey() error {
	paused, err := r.session.Beat()
	if err != nil {
		return err
	}
	if paused {
		r.health.Set(checkRelay, errPaused)
	} else {
		r.health.Set(checkRelay, nil)
	}
	if paused == r.paused {
		return nil
	}
	r.paused = paused
	set01(r.metrics.Paused, paused)
	if paused {
		r.log.Info("paused by an operator")
		r.publisher.Recall()
	} else {
		r.log.Info("resumed by an operator")
		r.wake(CauseStart)
		r.look.begin()
	}
	return r.showFlags()
}

// listenProof is how the last proof that notifications arrive ended. The zero value was not put to it.
type listenProof struct {
	probed time.Time
	state  listenState
	judged bool // the probe has failed
}

type listenState int

const (
	listenUnproven listenState = iota
	listenWorks
	listenFails
)

// proveListen notifies our own channel now and then: LISTEN succeeds behind a transaction
// pooler and on a dead link too, only a round trip shows that notifications arrive.
func (r *Relay) proveListen() error {
	p := &r.listen
	since := time.Since(p.probed)
	switch heard := !r.ears.Heard().Before(p.probed); {
	case p.probed.IsZero() || since >= probeInterval:
		p.probed, p.judged = time.Now(), false
		return r.session.Probe(r.ears.ProbeChannel())
	case heard && p.state != listenWorks:
		if p.state == listenFails {
			r.log.Info("notifications arrive again")
		}
		p.state = listenWorks
		set01(r.metrics.ListenHealthy, true)
	case !heard && since >= probePatience && !p.judged:
		p.judged = true
		if p.state != listenFails {
			r.log.Warn("notifications do not arrive: events wait for the fallback poll", "fallback_interval", r.cfg.FallbackInterval)
		}
		p.state = listenFails
		set01(r.metrics.ListenHealthy, false)
		r.ears.Reconnect() // it may be connected to a server that is the primary no more
	}
	return nil
}

// sleep waits for d or until ctx is done.
func sleep(ctx context.Context, d time.Duration) {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-ctx.Done():
	case <-t.C:
	}
}
