package main

import "slices"

// The publisher's order: who may be written when, and what becomes of those behind a failure.

// request is what Run is asked to do; one of the fields is set. Requests are dealt with in turn.
type request struct {
	publish []*Event
	recall  bool
	taken   []Aggregate // of which a result other than Confirmed was taken, once for each
}

// chain holds the events of an aggregate back until those before them are confirmed.
type chain struct {
	active int      // in ready, in solo or in flight
	queue  []*Event // behind them
	// failed counts results other than Confirmed that were not taken yet. Whoever calls Publish
	// does not know of these: what it hands over until then would overtake them, and is released.
	failed int
}

// Publish hands events over. Each comes back by Take exactly once, except that a Late one may
// come a second time, Confirmed.
func (p *AMQPPublisher) Publish(events []*Event) {
	p.ask(request{publish: events})
}

func (p *AMQPPublisher) ask(q request) {
	p.mu.Lock()
	p.inbox = append(p.inbox, q)
	p.mu.Unlock()
	p.wake.Ring()
}

// Recall asks for all events back that were not written yet; they come as Released.
func (p *AMQPPublisher) Recall() { p.ask(request{recall: true}) }

// Take returns what became of events since the last call, and the state of the link. An event
// behind one that was not confirmed must be handed over by a later Publish only when it may go
// before that one.
func (p *AMQPPublisher) Take() ([]Result, Link) {
	p.mu.Lock()
	defer p.mu.Unlock()
	results := p.results
	p.results = nil
	var taken []Aggregate
	for _, r := range results {
		if r.Outcome != Confirmed {
			taken = append(taken, r.Event.Aggregate())
		}
	}
	if len(taken) > 0 {
		p.inbox = append(p.inbox, request{taken: taken})
	}
	return results, p.link
}

// accept deals with the requests that came in.
func (p *AMQPPublisher) accept() {
	p.mu.Lock()
	inbox := p.inbox
	p.inbox = nil
	p.mu.Unlock()
	for _, q := range inbox {
		for _, e := range q.publish {
			p.lineUp(e)
		}
		for _, a := range q.taken {
			if c := p.chains[a]; c != nil {
				c.failed--
				p.tidy(a, c)
			}
		}
		if q.recall {
			p.release("recalled")
		}
	}
}

// lineUp puts e at the end of its chain.
func (p *AMQPPublisher) lineUp(e *Event) {
	if p.cfg.Ordering == orderingNone {
		p.enqueue(e)
		return
	}
	c := p.chains[e.Aggregate()]
	if c == nil {
		c = &chain{}
		p.chains[e.Aggregate()] = c
	}
	switch {
	case c.failed > 0:
		p.fail(c, Result{Event: e, Outcome: Released, Reason: reasonBehind})
	case c.active < p.cfg.AggregateWindow:
		c.active++
		p.enqueue(e)
	default:
		c.queue = append(c.queue, e)
	}
}

// tidy forgets a chain of which nothing is left.
func (p *AMQPPublisher) tidy(a Aggregate, c *chain) {
	if c.active == 0 && c.failed == 0 && len(c.queue) == 0 {
		delete(p.chains, a)
	}
}

const reasonBehind = "an earlier event of the aggregate failed"

// enqueue lines e up for writing, alone when it is known or suspected to break its channel.
func (p *AMQPPublisher) enqueue(e *Event) {
	if e.Isolate || p.accused[e.ID] {
		p.solo = append(p.solo, e)
	} else {
		p.ready = append(p.ready, e)
	}
}

// resolve reports r and moves the event's chain on.
func (p *AMQPPublisher) resolve(r Result) {
	delete(p.accused, r.Event.ID)
	delete(p.closings, r.Event.ID)
	c := p.chains[r.Event.Aggregate()]
	if c == nil { // unordered
		p.report(r)
		return
	}
	c.active--
	switch {
	case r.Outcome != Confirmed:
		p.fail(c, r)
		p.releaseQueue(c, reasonBehind)
	case len(c.queue) > 0:
		p.report(r)
		next := c.queue[0]
		c.queue = c.queue[1:]
		c.active++
		p.enqueue(next)
	default:
		p.report(r)
		p.tidy(r.Event.Aggregate(), c)
	}
}

// fail reports a result other than Confirmed and breaks the chain until it is taken.
func (p *AMQPPublisher) fail(c *chain, r Result) {
	c.failed++
	p.report(r)
}

func (p *AMQPPublisher) releaseQueue(c *chain, reason string) {
	for _, e := range c.queue {
		p.fail(c, Result{Event: e, Outcome: Released, Reason: reason})
	}
	c.queue = nil
}

// release gives all events back that were not written.
func (p *AMQPPublisher) release(reason string) {
	for _, c := range p.chains {
		p.releaseQueue(c, reason)
	}
	unwritten := slices.Concat(p.ready, p.solo)
	p.ready, p.solo = nil, nil
	for _, e := range unwritten {
		p.resolve(Result{Event: e, Outcome: Released, Reason: reason})
	}
}

// report hands a result over at the next deliver.
func (p *AMQPPublisher) report(r Result) { p.out = append(p.out, r) }

// deliver makes the reported results visible to Take.
func (p *AMQPPublisher) deliver() {
	if len(p.out) == 0 {
		return
	}
	p.mu.Lock()
	p.results = append(p.results, p.out...)
	p.mu.Unlock()
	p.out = p.out[:0]
	p.bell.Ring()
}
