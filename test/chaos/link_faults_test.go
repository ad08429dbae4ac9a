package chaos

import (
	"time"

	"outbox-relay/internal/testenv"
)

// link is one of a relay's two.
type link func(*relay) *testenv.Proxy

func postgresLink(r *relay) *testenv.Proxy { return r.postgres }
func rabbitmqLink(r *relay) *testenv.Proxy { return r.rabbitmq }

// links are those of the working relay, or of both.
func (c *chaos) links(of link) []*testenv.Proxy {
	works, standsBy := c.active()
	if c.rng.IntN(2) == 0 {
		return []*testenv.Proxy{of(works)}
	}
	return []*testenv.Proxy{of(works), of(standsBy)}
}

// resume is the end of whatever is wrong with links.
func resume(links []*testenv.Proxy) func() {
	return func() {
		for _, p := range links {
			p.Resume()
		}
	}
}

// times does something up to four times, at random moments.
func (c *chaos) times(f func()) {
	for n := 1 + c.rng.IntN(4); n > 0; n-- {
		f()
		if n > 1 {
			time.Sleep(c.between(0, 1500*time.Millisecond))
		}
	}
}

func cut(of link) func(*chaos, bool) func() {
	return func(c *chaos, _ bool) func() {
		links := c.links(of)
		c.times(func() {
			for _, p := range links {
				p.Cut()
			}
		})
		return nil
	}
}

// cutWithin lets some bytes of what the server says through and then no more: of a statement's
// answer, or of confirms, a part arrives.
func cutWithin(of link) func(*chaos, bool) func() {
	return func(c *chaos, _ bool) func() {
		links := c.links(of)
		c.times(func() {
			for _, p := range links {
				p.StallAfter(testenv.ToClient, 1+c.rng.Int64N(3000))
			}
			time.Sleep(c.between(50*time.Millisecond, 500*time.Millisecond))
			for _, p := range links {
				p.Cut()
				p.Resume()
			}
		})
		return nil
	}
}

func refuse(of link) func(*chaos, bool) func() {
	return func(c *chaos, _ bool) func() {
		links := c.links(of)
		for _, p := range links {
			p.Refuse()
		}
		return c.lasting(longest, resume(links))
	}
}

// stall stops all traffic, or that of one direction.
func stall(of link) func(*chaos, bool) func() {
	return func(c *chaos, _ bool) func() {
		links := c.links(of)
		directions := [][]testenv.Direction{nil, {testenv.ToServer}, {testenv.ToClient}}[c.rng.IntN(3)]
		for _, p := range links {
			p.Stall(directions...)
		}
		return c.lasting(longest, resume(links))
	}
}

// stallWithin lets some bytes of what the server says through, and then no more for a while: some
// confirms arrive, others sent with them do not.
func stallWithin(of link) func(*chaos, bool) func() {
	return func(c *chaos, _ bool) func() {
		links := c.links(of)
		for _, p := range links {
			p.StallAfter(testenv.ToClient, 1+c.rng.Int64N(3000))
		}
		return c.lasting(longest, resume(links))
	}
}

func slow(of link) func(*chaos, bool) func() {
	return func(c *chaos, _ bool) func() {
		links := c.links(of)
		d := c.between(10*time.Millisecond, 200*time.Millisecond)
		for _, p := range links {
			p.Delay(d)
		}
		return c.lasting(longest/2, resume(links))
	}
}
