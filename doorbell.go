package main

import "time"

const (
	// pollMin and pollMax bound the time between polls while sleep is refused: an open transaction
	// of a silent writer keeps the relay awake, and its event must not wait long.
	pollMin = time.Millisecond
	pollMax = 20 * time.Millisecond
	// awakePoll is the time between polls while writers are many enough to be kept silent.
	awakePoll = time.Millisecond

	// A commit that rings holds a lock of the whole server until it is flushed. wakeShare is the
	// share of time that lock may be held before writers are told to be silent, and sleepShare
	// the share below which they may ring again; in between nothing changes.
	wakeShare  = 0.2
	sleepShare = 0.1
	// rateWindow is over how long rings or events are counted to know their rate.
	rateWindow = 100 * time.Millisecond
	// smallSettle is up to how many events a settle tells what a commit takes: the flush, and
	// little else.
	smallSettle = 8
	// flushInterval is how often a settle waits for the disk, as writers do, to know what that takes.
	flushInterval = time.Second
)

// doorbell decides whether writers ring. Asleep, the relay holds the doorbell lock and every
// commit notifies it. Awake, it does not, writers are silent, and it polls. Deaf, it cannot or
// may not publish: it holds no lock and does not poll.
//
// It is asleep, also while it works, as long as ringing costs the writers little: a ring is
// the shortest way, and polls cost something too. The zero value is awake and about to sleep.
type doorbell struct {
	held     bool
	silent   bool          // awake by choice: there are many writers
	refused  time.Time     // since when sleep is refused; zero when it is not
	pause    time.Duration // between polls while sleep is refused
	nextPoll time.Time     // zero when no poll is wanted
	rate     rate          // of rings while asleep, of events while awake
	rings    uint64        // heard when rate was last fed
	commit   commitTime
}

// tendDoorbell brings the doorbell into the state it should have while there is nothing to do.
// It reports true when the relay must look for events at once.
func (r *Relay) tendDoorbell(able bool) (look bool, err error) {
	d := &r.doorbell
	now := time.Now()
	switch {
	case !able:
		return false, r.goDeaf()
	case d.held:
		rings := r.ears.Rings()
		d.rate.add(now, int(rings-d.rings))
		d.rings = rings
		if d.share() <= wakeShare {
			return false, nil
		}
		*d = doorbell{silent: true, commit: d.commit}
		r.metrics.SetDoorbell(Awake)
		return false, r.session.ReleaseDoorbell()
	case !r.keeper: // another relay keeps it, and what rings for that one rings for us
		r.metrics.SetDoorbell(Asleep)
		return false, nil
	case now.Before(d.nextPoll):
		return false, nil
	case d.silent:
		d.rate.add(now, 0)
		if !d.rate.known || d.share() >= sleepShare {
			d.nextPoll = now.Add(awakePoll)
			r.wake(CauseAwake)
			return true, nil
		}
		d.silent = false
	}
	got, err := r.session.TryDoorbell()
	if err != nil {
		return false, err
	}
	if got {
		*d = doorbell{held: true, commit: d.commit, rings: r.ears.Rings()}
		r.metrics.SetDoorbell(Asleep)
		r.metrics.DoorbellRefused.Set(0)
		// A silent writer may have committed between the last claim and the lock. The look must
		// be a statement of its own: one that began before the lock was had would not see it.
		r.due = true
		r.look.begin()
		return true, nil
	}
	if d.refused.IsZero() {
		d.refused = now
	}
	r.metrics.SetDoorbell(Awake)
	r.metrics.DoorbellRefused.Set(now.Sub(d.refused).Seconds())
	d.pause = min(max(2*d.pause, pollMin), pollMax)
	d.nextPoll = now.Add(d.pause)
	r.wake(CauseAwake)
	return true, nil
}

// goDeaf gives the lock up: nobody need ring for a relay that cannot publish.
func (r *Relay) goDeaf() error {
	held := r.doorbell.held
	r.doorbell = doorbell{commit: r.doorbell.commit}
	r.metrics.SetDoorbell(Deaf)
	r.metrics.DoorbellRefused.Set(0)
	if !held {
		return nil
	}
	return r.session.ReleaseDoorbell()
}

// share is the share of time that the server's lock for notifying commits is held, or would be
// if writers rang.
func (d *doorbell) share() float64 { return d.rate.perSecond * d.commit.estimate().Seconds() }

// claimed takes note of how many events a claim found and how long it took.
func (d *doorbell) claimed(events int, took time.Duration) {
	if !d.held {
		d.rate.add(time.Now(), events)
	}
	if d.commit.trip == 0 || took < d.commit.trip {
		d.commit.trip = took
	}
}

// commitTime finds out how long a commit takes to reach the disk: as long as a small settle that
// waits for it takes beyond a round trip. The zero value has measured nothing.
type commitTime struct {
	settle   time.Duration // what such a settle takes
	trip     time.Duration // what the shortest claim took: a round trip without a flush
	measured time.Time     // when settle last was
}

// due reports whether to measure with a settle of so many events.
func (c *commitTime) due(events int) bool {
	return events <= smallSettle && time.Since(c.measured) >= flushInterval
}

// flushed takes note of how long a settle took that waited for the disk. The shortest counts most, since
// anything may have made the others longer.
func (c *commitTime) flushed(took time.Duration) {
	c.measured = time.Now()
	if c.settle == 0 || took < c.settle {
		c.settle = took
	} else {
		c.settle += (took - c.settle) / 4
	}
}

func (c *commitTime) estimate() time.Duration { return max(c.settle-c.trip, 0) }

// rate counts over windows of rateWindow. The zero value starts with the first add.
type rate struct {
	since     time.Time
	count     int
	perSecond float64 // of the last full window
	known     bool    // there was one
}

func (m *rate) add(now time.Time, n int) {
	if m.since.IsZero() {
		m.since = now
	}
	m.count += n
	if elapsed := now.Sub(m.since); elapsed >= rateWindow {
		*m = rate{since: now, perSecond: float64(m.count) / elapsed.Seconds(), known: true}
	}
}
