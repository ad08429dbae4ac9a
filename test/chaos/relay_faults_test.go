package chaos

import (
	"syscall"
	"time"
)

// replace lets a relay be down for a while and starts another process in its place.
func (c *chaos) replace(r *relay) (end func()) {
	return c.lasting(4*time.Second, func() {
		r.start()
		r.process().Ready(c.t)
	})
}

func (r *relay) kill() {
	r.signal(syscall.SIGKILL)
	r.process().Wait(r.c.t, 10*time.Second)
	r.c.killed = time.Now()
}

func killRelay(c *chaos, _ bool) func() {
	works, _ := c.active()
	works.kill()
	return c.replace(works)
}

func killBoth(c *chaos, _ bool) func() {
	for _, r := range c.relays {
		r.kill()
	}
	ends := []func(){c.replace(c.relays[0]), c.replace(c.relays[1])}
	return func() {
		for _, end := range ends {
			end()
		}
	}
}

// stop ends a relay as a deploy does. Alone, everything in flight is settled.
func (r *relay) stop(alone bool) {
	r.c.t.Helper()
	code := r.process().Stop(r.c.t)
	switch {
	case code == 0:
	case alone:
		r.c.violation("relay %s ended with exit code %d after SIGTERM, want 0", r.name, code)
	default: // what was in flight could not be settled in time
		r.c.killed = time.Now()
	}
}

func terminateRelay(c *chaos, alone bool) func() {
	works, _ := c.active()
	works.stop(alone)
	return c.replace(works)
}

func terminateStandby(c *chaos, alone bool) func() {
	_, standsBy := c.active()
	standsBy.stop(alone)
	return c.replace(standsBy)
}

// takeOverWithin is how long a relay may be frozen before another must work: 15 s and what a busy
// machine adds.
const takeOverWithin = 18 * time.Second

// freeze stops a relay for longer than its locks live. When it wakes up it must neither publish
// on nor overwrite what the other one has done meanwhile: copies beyond what it had in hand, an
// event out of order and a changed row are for the oracle to find.
func freeze(c *chaos, alone bool) func() {
	works, other := c.active()
	works.signal(syscall.SIGSTOP)
	frozen := time.Now()
	for alone && !other.leads() {
		if time.Since(frozen) > takeOverWithin {
			c.violation("relay %s is frozen, and %s has not taken over within %v", works.name, other.name, takeOverWithin)
			break
		}
		time.Sleep(20 * time.Millisecond)
	}
	return func() {
		time.Sleep(longest - time.Since(frozen))
		works.signal(syscall.SIGCONT)
		if !alone || !c.ordered() {
			return
		}
		for end := time.Now().Add(5 * time.Second); works.leads(); time.Sleep(20 * time.Millisecond) {
			if time.Now().After(end) {
				c.violation("relay %s, woken up, still believes that it leads", works.name)
				break
			}
		}
	}
}
