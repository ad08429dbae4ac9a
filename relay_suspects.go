package main

import (
	"fmt"
	"time"
)

const (
	// suspiciousDeaths is how many relays in a row must die before events are suspected. One
	// may have been killed by anything.
	suspiciousDeaths = 2
	// fatalDeaths is with how many deaths an event is set aside as the cause of them.
	fatalDeaths = 3
	// healthyAfter is how long a relay must work for the deaths before it to be forgotten.
	healthyAfter = time.Minute
)

// An event may make the relay itself die, by its size say. After several deaths in a row the
// next events, one of which must be it, are therefore taken in hand one by one, and each is
// noted in outbox_suspects before its payload is read. The one that was noted at each of a few
// deaths is set aside as a dead letter.
//
// A relay that loses its session does not die. Another may take over and take it for dead, so one
// that comes back takes its own death off the count, and notes no event twice.

// suspect decides at the start of work whether events are under suspicion.
func (r *Relay) suspect(deaths int) {
	r.suspects, r.deaths = 0, deaths
	if deaths >= suspiciousDeaths {
		r.suspects = 2 * r.cfg.BatchSize // more than a relay has in hand
		r.log.Warn("several relays died in a row: taking the next events one by one to find out whether one of them is the cause",
			"deaths", deaths, keyCount, r.suspects)
	}
}

// claimSuspect takes the next event in hand, alone, or sets it aside.
func (r *Relay) claimSuspect(q ClaimQuery) error {
	q.Mark = -1
	e, deaths, err := r.session.Suspect(q, r.noted)
	if err != nil {
		return err
	}
	if e == nil {
		r.due = false
		return r.trust()
	}
	r.noted[e.ID] = true
	r.suspects--
	if deaths > fatalDeaths {
		reason := fmt.Sprintf("set aside: the relay died %d times with this event in hand", deaths-1)
		r.log.Error("event "+reason, eventAttrs(e)...)
		_, err := r.session.Settle(Settlement{Failed: []Failure{{Event: e, Attempts: e.Attempts, Dead: true, Reason: reason}}})
		if err != nil {
			return err
		}
		r.metrics.CountFailed(e.EventType)
		return r.acquit(e.ID)
	}
	q.Limit = 1
	c, err := r.session.Claim(q)
	if err != nil {
		return err
	}
	r.accept(c)
	r.due = true // there may be more
	return nil
}

// acquit ends the suspicion against an event that is settled.
func (r *Relay) acquit(id string) error {
	delete(r.noted, id)
	return r.session.Acquit(id)
}

// trust ends all suspicion.
func (r *Relay) trust() error {
	r.suspects, r.deaths = 0, 0
	clear(r.noted)
	r.look.begin()
	return r.session.AcquitAll()
}
