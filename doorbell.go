package main

import "time"

const (
	// pollMin and pollMax bound the time between polls while sleep is refused: an open transaction
	// of a silent writer keeps the relay awake, and its event must not wait long.
	pollMin = time.Millisecond
	pollMax = 20 * time.Millisecond
)

// doorbell decides whether writers ring. Asleep, the relay holds the doorbell lock and every
// commit notifies it. Awake, it does not, writers are silent, and it polls. Deaf, it cannot or
// may not publish: it holds no lock and does not poll.
//
// It is asleep whenever it may: even while it works, since at low rates a ring costs less than
// polls do. The zero value is awake.
type doorbell struct {
	held     bool
	refused  time.Time     // since when sleep is refused; zero when it is not
	pause    time.Duration // between polls
	nextPoll time.Time     // zero when no poll is wanted
}

// tendDoorbell brings the doorbell into the state it should have while there is nothing to do.
// It reports true when the relay must look once more before it sleeps.
func (r *Relay) tendDoorbell(able bool) (look bool, err error) {
	d := &r.doorbell
	switch {
	case !able:
		return false, r.goDeaf()
	case d.held:
		return false, nil
	case !r.keeper: // another relay keeps it, and what rings for that one rings for us
		r.metrics.SetDoorbell(Asleep)
		return false, nil
	case time.Now().Before(d.nextPoll):
		return false, nil
	}
	got, err := r.session.TryDoorbell()
	if err != nil {
		return false, err
	}
	if got {
		*d = doorbell{held: true}
		r.metrics.SetDoorbell(Asleep)
		r.metrics.DoorbellRefused.Set(0)
		// A silent writer may have committed between the last claim and the lock. The look must
		// be a statement of its own: one that began before the lock was had would not see it.
		r.due, r.fullLook = true, true
		return true, nil
	}
	if d.refused.IsZero() {
		d.refused = time.Now()
	}
	r.metrics.SetDoorbell(Awake)
	r.metrics.DoorbellRefused.Set(time.Since(d.refused).Seconds())
	d.pause = min(max(2*d.pause, pollMin), pollMax)
	d.nextPoll = time.Now().Add(d.pause)
	return false, nil
}

// goDeaf gives the lock up: nobody need ring for a relay that cannot publish.
func (r *Relay) goDeaf() error {
	held := r.doorbell.held
	r.doorbell = doorbell{}
	r.metrics.SetDoorbell(Deaf)
	r.metrics.DoorbellRefused.Set(0)
	if !held {
		return nil
	}
	return r.session.ReleaseDoorbell()
}
