package main

import (
	"context"
	"log/slog"
	mathrand "math/rand/v2"
	"time"
)

// take notes one result.
func (r *Relay) take(res Result) {
	r.metrics.Outcomes[res.Outcome].Inc()
	e := res.Event
	if res.Outcome == Late { // counts no attempt, and must not pile up copies in its queue either
		r.lates[e.ID]++
	} else if len(r.lates) > 0 {
		delete(r.lates, e.ID)
	}
	h := r.hand[e.ID]
	if h != nil && h.event == e {
		r.inFlight--
	}
	switch {
	case res.Outcome == Unknown || res.Outcome == Released:
		r.drop(e)
		r.low.rewind(e.Seq)
		r.due = true
		if res.Outcome == Unknown {
			r.log.Debug("outcome unknown, will be sent again", append(eventAttrs(e), keyReason, res.Reason)...)
		}
		return
	case res.Outcome == Confirmed:
		r.metrics.Published.Inc()
		if !e.CreatedAt.IsZero() {
			r.metrics.PublishDelay.Observe(max(time.Since(e.CreatedAt)+r.session.ClockAhead(), 0).Seconds())
		}
		if r.log.Enabled(context.Background(), slog.LevelDebug) { // not worth its allocations otherwise
			r.log.Debug("published", eventAttrs(e)...)
		}
	default:
		if res.Outcome.CountsAttempt() {
			r.metrics.CountFailed(e.EventType)
		}
		r.logFailure(res)
	}
	if len(r.done) == 0 {
		r.doneSince = time.Now()
	}
	r.done = append(r.done, res)
	if res.Outcome != Confirmed {
		r.failures++
	}
}

// logFailure says that an event was not published, and what becomes of it.
func (r *Relay) logFailure(res Result) {
	e, f := res.Event, r.failure(res)
	attrs := append(eventAttrs(e), keyReason, res.Reason)
	old := !e.CreatedAt.IsZero() && time.Since(e.CreatedAt)+r.session.ClockAhead() >= f.DeadAfter
	if f.Dead && (old || f.DeadAfter == 0) {
		r.log.Error("event not published: "+res.Outcome.String()+", and given up: it is a dead letter now", attrs...)
		return
	}
	r.log.Warn("event not published: "+res.Outcome.String(), append(attrs, "retry_within", r.retryDelay(f))...)
}

// drop forgets an event that was in hand.
func (r *Relay) drop(e *Event) {
	if h := r.hand[e.ID]; h != nil && h.event == e {
		delete(r.hand, e.ID)
		r.handBytes -= int64(len(e.Payload))
	}
}

// mustSettle: a failed event holds its aggregate back only once that is written down, so before
// the next claim.
func (r *Relay) mustSettle() bool {
	if r.cfg.Ordering == orderingNone {
		return r.inFlight == 0 && (r.open || len(r.done) > 0)
	}
	return r.failures > 0
}

// settlePatience is how long a result waits for others to share a commit with.
const settlePatience = 100 * time.Millisecond

// maySettle: half of what is out is done, so a commit is worth it, or results have waited for that long enough:
// where confirms are slow and events keep coming it would never be.
func (r *Relay) maySettle() bool {
	return r.cfg.Ordering == orderingAggregate && len(r.done) > 0 &&
		(len(r.done) >= r.inFlight || time.Since(r.doneSince) >= settlePatience)
}

// settleAll marks what is done, and tries what another session had locked again.
func (r *Relay) settleAll() error {
	r.done, r.locked = append(r.done, r.locked...), nil
	return r.settleNow(true)
}

// settle marks what is done.
func (r *Relay) settle() error { return r.settleNow(false) }

func (r *Relay) settleNow(skipLocked bool) error {
	done := r.done
	s := Settlement{Flush: r.doorbell.commit.due(len(done)), SkipLocked: skipLocked}
	for _, res := range done {
		if res.Outcome == Confirmed {
			s.Confirmed = append(s.Confirmed, res.Event)
		} else {
			s.Failed = append(s.Failed, r.failure(res))
		}
	}
	began := time.Now()
	settled, err := r.session.Settle(s)
	if err != nil {
		r.failures = len(s.Failed)
		return err
	}
	if s.Flush {
		r.doorbell.commit.flushed(time.Since(began))
	}
	r.metrics.Settles.Inc()
	if settled.Changed > 0 {
		r.low.settled()
	}
	r.open = false
	isLocked := make(map[string]bool, len(settled.Locked))
	for _, id := range settled.Locked {
		isLocked[id] = true
	}
	r.done, r.failures = nil, 0
	var acquitted []string
	for _, res := range done {
		if isLocked[res.Event.ID] {
			r.locked = append(r.locked, res)
			continue
		}
		r.settled(res)
		if r.suspects > 0 {
			acquitted = append(acquitted, res.Event.ID)
		}
	}
	r.metrics.SettleSkipped.Add(float64(len(settled.Locked)))
	for _, f := range s.Failed {
		if at := time.Now().Add(f.Retry); r.nextRetry.IsZero() || at.Before(r.nextRetry) {
			r.nextRetry = at
		}
	}
	for _, id := range acquitted {
		if err := r.acquit(id); err != nil {
			return err
		}
	}
	return nil
}

// settled forgets an event that is marked.
func (r *Relay) settled(res Result) {
	e := res.Event
	h := r.hand[e.ID]
	if h != nil && h.event == e {
		r.metrics.BatchDuration.Observe(time.Since(h.claimed).Seconds())
	}
	if h == nil || e.Retried { // it held later events back; they may go on
		r.low.rewind(e.Seq)
		r.due = true
	}
	r.drop(e)
}

// failure is what to write down for an event that was not confirmed.
func (r *Relay) failure(res Result) Failure {
	e := res.Event
	f := Failure{Event: e, Attempts: e.Attempts, Reason: res.Outcome.String() + ": " + res.Reason}
	if res.Outcome.CountsAttempt() {
		f.Attempts++
		f.Dead = res.Final || f.Attempts >= r.cfg.MaxAttempts
	}
	if res.Outcome == Nacked { // a full queue is a condition that passes
		f.DeadAfter = r.cfg.DeadAfter
	}
	f.Retry = r.retryDelay(f)
	f.Retry -= time.Duration(mathrand.Int64N(int64(f.Retry)/5 + 1)) // so that failures of one moment spread
	return f
}

// retryDelay is how long after a failure its event is tried again at the latest.
func (r *Relay) retryDelay(f Failure) time.Duration {
	return retryDelay(r.cfg.RetryBase, r.cfg.RetryMax, max(f.Attempts, r.lates[f.Event.ID], 1))
}

// retryDelay is base doubled n-1 times, at most longest.
func retryDelay(base, longest time.Duration, n int) time.Duration {
	d := longest
	if n <= 40 { // 2^39 times anything reasonable is over any limit
		if doubled := base << (n - 1); doubled > 0 && doubled>>(n-1) == base {
			d = min(doubled, longest)
		}
	}
	return d
}
