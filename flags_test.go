package main

import (
	"errors"
	"slices"
	"testing"
	"testing/synctest"
	"time"
)

// What is in flight when the pause begins is waited for: only then the relay shows that it obeys.
func TestPauseIsShownOnceNothingIsInFlight(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t, func(r *rig) {
			r.session.pending = eventsUpTo(5)
			r.publisher.held = true
		})
		r.session.paused = true
		r.step(3 * time.Second)
		if r.session.flags[FlagPaused] || r.publisher.recalls == 0 {
			t.Errorf("with events in flight: paused is shown %v, recalls %d", r.session.flags[FlagPaused], r.publisher.recalls)
		}
		r.publisher.answer()
		r.step(2 * time.Second)
		if !r.session.flags[FlagPaused] || len(r.session.pending) != 0 {
			t.Errorf("paused is shown %v, %d of the events in flight not settled", r.session.flags[FlagPaused], len(r.session.pending))
		}
		r.stop()
		r.step(0)
	})
}

func TestFlagsFollowTheRelay(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t, nil)
		r.step(2 * time.Second)
		for _, f := range []Flag{FlagRelay, FlagListening, FlagBroker} {
			if !r.session.flags[f] {
				t.Errorf("flag %d is not shown by a relay that is well", f)
			}
		}
		for range 2 { // the same error is written down once
			r.publisher.link = Link{Err: errors.New("dial tcp 127.0.0.1:40001->127.0.0.1:5672: refused")}
			r.news.Ring()
			r.step(2 * time.Second)
			r.publisher.link = Link{Err: errors.New("dial tcp 127.0.0.1:40002->127.0.0.1:5672: refused")}
		}
		if r.session.flags[FlagBroker] {
			t.Error("the broker is shown as connected while it is not")
		}
		if want := []string{"rabbitmq: dial tcp 127.0.0.1->127.0.0.1:5672: refused"}; !slices.Equal(r.session.errors, want) {
			t.Errorf("errors = %q, want %q", r.session.errors, want)
		}
		r.publisher.link = Link{Up: true}
		r.session.failOn = "claim" // the session is lost
		r.news.Ring()
		r.step(0)
		r.session.failOn = ""
		r.step(3 * time.Second)
		if !r.session.flags[FlagBroker] || r.session.errors[len(r.session.errors)-1] != "postgres: claim failed" {
			t.Errorf("broker is shown %v, errors = %q", r.session.flags[FlagBroker], r.session.errors)
		}
		r.stop()
		r.step(0)
	})
}
