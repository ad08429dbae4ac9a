package main

import (
	"time"
)

// room reports whether enough of the batch is done to claim more. A batch of an unordered
// outbox is one transaction: it must be settled whole first.
func (r *Relay) room() bool {
	if r.cfg.Ordering == orderingNone {
		return len(r.hand) == len(r.locked)
	}
	if r.suspects > 0 {
		return len(r.hand) == len(r.locked)
	}
	return len(r.hand)-len(r.locked) <= r.cfg.BatchSize/2 && r.handBytes <= r.cfg.BatchBytes/2
}

// claim takes the next events and hands them to the publisher.
func (r *Relay) claim() error {
	q := ClaimQuery{
		Mark:   r.low.mark,
		Limit:  r.limit,
		Bytes:  max(r.cfg.BatchBytes-r.handBytes, 1),
		InHand: make([]string, 0, len(r.hand)),
	}
	switch {
	case r.cfg.Ordering == orderingNone: // rows that others have locked are behind the mark
		q.Mark = -1
	case r.look.wanted:
		q.Mark = min(r.look.from, q.Mark)
	}
	for id := range r.hand {
		q.InHand = append(q.InHand, id)
	}
	if r.suspects > 0 {
		return r.claimSuspect(q)
	}
	began := time.Now()
	c, err := r.session.Claim(q)
	if err != nil {
		return err
	}
	released := c.Released != r.released
	r.released = c.Released
	if released && q.Mark >= 0 { // what a dead letter held back is below the mark, and comes before what was found
		r.look.begin()
		return nil
	}
	r.look.claimed(c, r.low.mark, began)
	r.doorbell.claimed(len(c.Events), time.Since(began))
	r.accept(c)
	if r.due && r.keeper && r.cfg.Ordering == orderingNone && time.Since(r.called) >= beatInterval {
		r.called = time.Now()
		return r.session.CallOthers()
	}
	return nil
}

// accept takes what a claim found in hand and gives it to the publisher.
func (r *Relay) accept(c Claim) {
	r.metrics.Claims.Inc()
	r.low.claimed(c)
	r.due = c.More
	if c.Cut { // large payloads: have the server unpack little more than fits
		r.limit = min(len(c.Events)+len(c.Events)/8+1, r.cfg.BatchSize)
	} else {
		r.limit = min(2*r.limit, r.cfg.BatchSize)
	}
	r.nextRetry = time.Time{}
	if c.NextRetry > 0 {
		r.nextRetry = time.Now().Add(c.NextRetry)
	}
	events := c.Events
	if r.cfg.Ordering == orderingNone {
		events = withoutCrowd(events)
		r.due = r.due || len(events) < len(c.Events)
	}
	if len(r.locked) > 0 {
		events = r.withoutLocked(events)
	}
	if len(events) == 0 {
		return
	}
	now := time.Now()
	for _, e := range events {
		r.hand[e.ID] = &held{event: e, claimed: now}
		r.handBytes += int64(len(e.Payload))
	}
	r.inFlight += len(events)
	r.open = r.cfg.Ordering == orderingNone
	r.metrics.BatchEvents.Observe(float64(len(events)))
	r.publisher.Publish(events)
}

// withoutLocked leaves out what follows an event whose failure could not be written down.
func (r *Relay) withoutLocked(events []*Event) []*Event {
	held := make(map[Aggregate]bool)
	for _, res := range r.locked {
		if res.Outcome != Confirmed {
			held[res.Event.Aggregate()] = true
		}
	}
	kept := events[:0]
	for _, e := range events {
		if held[e.Aggregate()] {
			r.low.rewind(e.Seq)
			continue
		}
		kept = append(kept, e)
	}
	return kept
}
