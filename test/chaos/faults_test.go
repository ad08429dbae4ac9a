package chaos

import (
	"syscall"
	"time"

	"outbox-relay/internal/testenv"
)

// target is what a fault breaks. Two faults at once break different things.
type target int

const (
	thePostgres target = iota // the server, or the relays' links to it
	theRabbitMQ
	aRelay
)

// fault is one way to break something.
type fault struct {
	name string
	hits target
	// copies is how often what a relay has in hand may be sent twice because of it.
	copies int
	short  bool // belongs to the short run
	// fromBegin: recovery is measured from the fault's begin, since another relay takes over.
	fromBegin bool
	// begin breaks it, and returns how to mend it again, nil if it is over. alone tells that nothing
	// else is broken at the same time.
	begin func(c *chaos, alone bool) (end func())
}

var faults = []fault{
	{name: "PostgreSQL link cut", hits: thePostgres, copies: 1, short: true, begin: cut(postgresLink)},
	{name: "RabbitMQ link cut", hits: theRabbitMQ, copies: 1, short: true, begin: cut(rabbitmqLink)},
	{name: "relay killed", hits: aRelay, copies: 1, short: true, fromBegin: true, begin: killRelay},
}

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

func cut(of link) func(*chaos, bool) func() {
	return func(c *chaos, _ bool) func() {
		for _, p := range c.links(of) {
			p.Cut()
		}
		return nil
	}
}

func killRelay(c *chaos, _ bool) func() {
	works, _ := c.active()
	works.signal(syscall.SIGKILL)
	works.process().Wait(c.t, 10*time.Second)
	hold := c.between(time.Second, 4*time.Second)
	return func() {
		time.Sleep(hold)
		works.start()
		works.process().Ready(c.t)
	}
}
