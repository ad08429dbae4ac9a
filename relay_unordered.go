package main

import (
	"slices"
	"time"
)

// leaseEvents is for how long events in flight are kept from other relays when their row locks
// had to be given up, and leaseRenew how often that is renewed.
const (
	leaseEvents = 10 * time.Second
	leaseRenew  = 3 * time.Second
)

// mustLease: a batch of an unordered outbox is a transaction. While the broker is blocked that
// could stay open for hours, and with it hold vacuum back.
func (r *Relay) mustLease() bool {
	return r.cfg.Ordering == orderingNone && r.link.Blocked != "" && len(r.hand) > 0 &&
		(r.open || time.Since(r.leased) > leaseRenew)
}

// lease ends the batch's transaction and keeps what is in flight from other relays by
// retry_after instead. The messages may be in the broker's socket by now, so they stay in
// memory until it says what became of them.
func (r *Relay) lease() error {
	if r.open {
		r.publisher.Recall()
	}
	r.leased = time.Now()
	s := Settlement{}
	settled := make(map[*Event]bool)
	for _, res := range r.done {
		settled[res.Event] = true
	}
	for _, h := range r.hand {
		if !settled[h.event] {
			s.Failed = append(s.Failed, Failure{Event: h.event, Attempts: h.event.Attempts, Retry: leaseEvents})
		}
	}
	r.open = false
	if _, err := r.session.Settle(s); err != nil {
		return err
	}
	return nil
}

// isolatedMost is how many events a batch may have that are published alone, one after the other.
// The batch is one transaction, so all others in it wait for these.
const isolatedMost = 10

// withoutCrowd leaves out the isolated events beyond the first few. They stay due.
func withoutCrowd(events []*Event) []*Event {
	isolated := 0
	return slices.DeleteFunc(slices.Clone(events), func(e *Event) bool {
		if e.Isolate {
			isolated++
		}
		return e.Isolate && isolated > isolatedMost
	})
}
