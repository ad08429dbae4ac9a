package main

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/cenkalti/backoff/v5"
	amqp "github.com/rabbitmq/amqp091-go"
)

const (
	// sweepInterval is how often confirms behind a slow one are looked for. Confirms mostly come
	// in order, so the oldest is waited for and the others are found in passing.
	sweepInterval = 2 * time.Millisecond
	// leaseRecheck is how often a lapsed lease is looked at again.
	leaseRecheck = 100 * time.Millisecond
	// reconnectMin and reconnectMax bound the pause between attempts to connect: short enough
	// that a broker that is back is used within about a second.
	reconnectMin = 100 * time.Millisecond
	reconnectMax = time.Second
)

var (
	errBrokerSilent = errors.New("no confirm of any message within CONFIRM_TIMEOUT")
	errBrokerClosed = errors.New("connection closed")
)

// Link says whether events can be published. The zero value means that no connection was made yet.
type Link struct {
	Up      bool
	Blocked string // the broker's reason for not accepting messages now, "" when it does
	Err     error  // why the link is not up; nil when it is, or was never tried
}

// AMQPPublisher publishes events over one session at a time and says what became of each.
//
// Publish, Recall and Take may be called from any goroutine; they never block on the network.
// All else is owned by the goroutine in Run. Of each aggregate at most cfg.AggregateWindow
// events are unconfirmed; when one fails, those behind it are Released.
type AMQPPublisher struct {
	cfg        Config
	mapper     *messageMapper
	log        *slog.Logger
	metrics    *Metrics
	mayPublish func() bool // the lease: false once the working session may have been lost
	wake       Bell        // wakes Run
	bell       Bell        // wakes whoever calls Take

	mu      sync.Mutex // guards the fields up to the blank line; nothing slow runs under it
	inbox   []order
	results []Result
	link    Link

	connected bool                 // there was a session before
	out       []Result             // reported, not yet visible to Take
	chains    map[Aggregate]*chain // aggregates with events in hand; unused when ORDERING=none
	ready     []*Event             // may be written now
	solo      []*Event             // to be published alone, one after the other
	flights   []*flight            // written, unconfirmed, in the order of writing
	late      []*flight            // reported Late; a confirm still counts
	suspects  map[string]bool      // ids that were in flight when the broker closed the connection
}

// order is what Run is asked to do; one of the fields is set. Orders are obeyed in turn.
type order struct {
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

// flight is a message that was written and waits for its confirm.
type flight struct {
	event    *Event
	channel  *amqpChannel
	confirm  *amqp.DeferredConfirmation
	sent     time.Duration // on the session's clock
	seen     int           // the session's confirms at that time
	returned string        // the broker's reason for returning it
}

// NewAMQPPublisher makes a publisher that rings bell whenever Take has news. mayPublish is asked
// before each write.
func NewAMQPPublisher(cfg Config, log *slog.Logger, m *Metrics, bell Bell, mayPublish func() bool) (*AMQPPublisher, error) {
	mapper, err := newMessageMapper(cfg)
	if err != nil {
		return nil, err
	}
	return &AMQPPublisher{
		cfg: cfg, mapper: mapper, log: log, metrics: m, mayPublish: mayPublish, bell: bell, wake: NewBell(),
		chains: make(map[Aggregate]*chain), suspects: make(map[string]bool),
	}, nil
}

// Publish hands events over. Each comes back by Take exactly once, except that a Late one may
// come a second time, Confirmed.
func (p *AMQPPublisher) Publish(events []*Event) {
	p.order(order{publish: events})
}

func (p *AMQPPublisher) order(o order) {
	p.mu.Lock()
	p.inbox = append(p.inbox, o)
	p.mu.Unlock()
	p.wake.Ring()
}

// Recall asks for all events back that were not written yet; they come as Released.
func (p *AMQPPublisher) Recall() { p.order(order{recall: true}) }

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
		p.inbox = append(p.inbox, order{taken: taken})
	}
	return results, p.link
}

// Run connects, publishes and reconnects until ctx is done, then says goodbye to the broker
// within a second. What is in flight by then is Unknown.
func (p *AMQPPublisher) Run(ctx context.Context) {
	pause := backoff.NewExponentialBackOff()
	pause.InitialInterval, pause.MaxInterval = reconnectMin, reconnectMax
	failures := &repeatLog{log: p.log.With(keyServer, PeerRabbitMQ), what: "use RabbitMQ"}
	for host := 0; ctx.Err() == nil; host++ {
		s, hosts, err := p.connect(ctx, host)
		if err == nil {
			failures.OK()
			p.setLink(Link{Up: true})
			err = p.serve(ctx, s)
			if s.confirms > 0 {
				pause.Reset()
			}
			p.end(s, err)
		}
		if ctx.Err() != nil {
			break
		}
		failures.Failed(err)
		p.metrics.ConnectionFailures[PeerRabbitMQ].Inc()
		if (host+1)%max(hosts, 1) == 0 { // each address was tried
			sleep(ctx, pause.NextBackOff())
		}
	}
}

// connect makes a session with one of the hosts of AMQP_URL, which is read anew each time.
func (p *AMQPPublisher) connect(ctx context.Context, host int) (*amqpSession, int, error) {
	urls, err := p.cfg.amqpURLs()
	if err != nil {
		p.setLink(Link{Err: err})
		return nil, 0, err
	}
	exchange := "" // one that differs between events cannot be declared beforehand
	if p.mapper.exchange.static() {
		exchange = p.cfg.AMQPExchange
	}
	s, err := dialAMQP(ctx, urls[host%len(urls)], p.cfg, exchange, p.maxInFlight(), p.onBlocked)
	if err != nil {
		err = fmt.Errorf("connect to %s: %w", redactedAMQPURL(urls[host%len(urls)]), err)
		p.setLink(Link{Err: err})
		return nil, len(urls), err
	}
	if p.connected {
		p.metrics.Reconnects[PeerRabbitMQ].Inc()
	}
	p.connected = true
	return s, len(urls), nil
}

// maxInFlight is how many messages may wait for a confirm: what the relay claims at most while
// half a batch is out, and as many late ones again.
func (p *AMQPPublisher) maxInFlight() int { return 4 * p.cfg.BatchSize }

func (p *AMQPPublisher) setLink(l Link) {
	p.mu.Lock()
	p.link = l
	p.mu.Unlock()
	set01(p.metrics.Connected[PeerRabbitMQ], l.Up)
	set01(p.metrics.Blocked, l.Blocked != "")
	p.bell.Ring()
}

// onBlocked runs in the session's watcher.
func (p *AMQPPublisher) onBlocked(b amqp.Blocking) {
	link := Link{Up: true}
	if b.Active {
		link.Blocked = "blocked"
		if b.Reason != "" {
			link.Blocked = b.Reason
		}
		p.log.Warn("RabbitMQ accepts no messages for now", "reason", link.Blocked)
	} else {
		p.log.Info("RabbitMQ accepts messages again")
	}
	p.setLink(link)
	p.wake.Ring()
}

func (p *AMQPPublisher) blocked() bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.link.Blocked != ""
}

// serve publishes over s until it is lost or ctx is done.
func (p *AMQPPublisher) serve(ctx context.Context, s *amqpSession) error {
	stop := context.AfterFunc(ctx, func() { // frees a write that the broker does not take
		time.AfterFunc(amqpCloseTimeout, func() { _ = s.raw.Close() })
	})
	defer stop()
	timer := time.NewTimer(time.Hour)
	defer timer.Stop()
	for {
		p.accept()
		if err := p.write(s); err != nil {
			return err
		}
		p.deliver()
		var oldest <-chan struct{} // nil while nothing is in flight
		if len(p.flights) > 0 {
			oldest = p.flights[0].confirm.Done()
		}
		var sideClosed chan *amqp.Error
		if s.side != nil {
			sideClosed = s.side.closed
		}
		timer.Reset(p.patience(s))
		var err error
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-p.wake:
		case <-oldest:
		case <-timer.C:
		case closed := <-s.main.closed:
			err = p.channelClosed(s, s.main, closed)
		case closed := <-sideClosed:
			err = p.channelClosed(s, s.side, closed)
		case closed := <-s.gone:
			err = connectionError(closed)
		}
		if err != nil {
			return err
		}
		p.collect(s)
		if err := p.expire(s); err != nil {
			return err
		}
	}
}

// patience is how long serve may sleep when nothing happens.
func (p *AMQPPublisher) patience(s *amqpSession) time.Duration {
	switch {
	case p.blocked(): // no confirm is expected, and the end of it rings
		return leaseRecheck
	case len(p.flights) > 1 || len(p.late) > 0 && len(p.flights) > 0:
		return sweepInterval
	case len(p.ready)+len(p.solo) > 0: // held back by the lease or the blocked broker
		return leaseRecheck
	case len(p.flights) == 1:
		return max(p.cfg.ConfirmTimeout-(s.clock.now()-p.flights[0].sent), sweepInterval)
	case len(p.late) > 0:
		return leaseRecheck
	default:
		return time.Hour
	}
}

// accept obeys the orders that came in.
func (p *AMQPPublisher) accept() {
	p.mu.Lock()
	inbox := p.inbox
	p.inbox = nil
	p.mu.Unlock()
	for _, o := range inbox {
		for _, e := range o.publish {
			p.lineUp(e)
		}
		for _, a := range o.taken {
			if c := p.chains[a]; c != nil {
				c.failed--
				p.tidy(a, c)
			}
		}
		if o.recall {
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
	if e.Isolate || p.suspects[e.ID] {
		p.solo = append(p.solo, e)
	} else {
		p.ready = append(p.ready, e)
	}
}

// write sends what may be sent, in few large writes.
func (p *AMQPPublisher) write(s *amqpSession) error {
	if len(p.ready)+len(p.solo) == 0 || p.blocked() {
		return nil
	}
	s.raw.Cork()
	err := p.writeReady(s)
	if err == nil {
		err = p.writeSolo(s)
	}
	return errors.Join(err, s.raw.Uncork())
}

func (p *AMQPPublisher) writeReady(s *amqpSession) error {
	n := 0
	defer func() { p.ready = slices.Delete(p.ready, 0, n) }()
	for _, e := range p.ready {
		if len(p.flights)+len(p.late) >= cap(s.returns) || !p.mayPublish() {
			return nil
		}
		err := p.send(s, s.main, e)
		if errors.Is(err, amqp.ErrClosed) {
			return nil // not written; the notice of the closing is on its way and says why
		}
		n++
		if err != nil {
			return err
		}
	}
	return nil
}

// writeSolo publishes the next event that has to go alone, on a channel of its own, so that the
// broker's closing of it touches no other.
func (p *AMQPPublisher) writeSolo(s *amqpSession) error {
	onSide := func(f *flight) bool { return f.channel == s.side }
	if len(p.solo) == 0 || !p.mayPublish() || s.side != nil && slices.ContainsFunc(p.flights, onSide) {
		return nil
	}
	if s.side == nil {
		if err := s.raw.Uncork(); err != nil { // opening waits for an answer
			return err
		}
		var err error
		if s.side, err = s.open(); err != nil {
			return err
		}
	}
	err := p.send(s, s.side, p.solo[0])
	if errors.Is(err, amqp.ErrClosed) {
		return nil
	}
	p.solo = slices.Delete(p.solo, 0, 1)
	return err
}

// send checks e and writes it. Any error but amqp.ErrClosed means that the session is lost.
func (p *AMQPPublisher) send(s *amqpSession, ch *amqpChannel, e *Event) error {
	if c := p.chains[e.Aggregate()]; c != nil && c.failed > 0 {
		p.resolve(Result{Event: e, Outcome: Released, Reason: reasonBehind})
		return nil
	}
	m, err := p.mapper.message(e)
	if err != nil {
		p.resolve(Result{Event: e, Outcome: Rejected, Reason: err.Error(), Final: true})
		return nil
	}
	f := &flight{event: e, channel: ch, sent: s.clock.now(), seen: s.confirms}
	f.confirm, err = ch.PublishWithDeferredConfirm(m.exchange, m.key, p.cfg.AMQPMandatory, false, m.publishing)
	if errors.Is(err, amqp.ErrClosed) {
		return err
	}
	if err != nil {
		p.resolve(Result{Event: e, Outcome: Unknown, Reason: "written in part"})
		return fmt.Errorf("write message: %w", err)
	}
	p.flights = append(p.flights, f)
	return nil
}

// collect reports the events whose confirms have come.
func (p *AMQPPublisher) collect(s *amqpSession) {
	var done []*flight
	split := func(flights []*flight) []*flight {
		return slices.DeleteFunc(flights, func(f *flight) bool {
			select {
			case <-f.confirm.Done():
			default:
				return false
			}
			// Not acked on a closed channel says nothing of this message.
			if !f.confirm.Acked() && f.channel.IsClosed() {
				return false
			}
			done = append(done, f)
			return true
		})
	}
	p.late = split(p.late)
	late := len(done)
	p.flights = split(p.flights)
	// A return comes before its ack and is in the buffer by now.
	p.matchReturns(s, done)
	for i, f := range done {
		s.confirms++
		r := Result{Event: f.event, Outcome: Confirmed}
		switch {
		case !f.confirm.Acked():
			r.Outcome, r.Reason = Nacked, "the broker refused the message (basic.nack)"
		case f.returned != "":
			r.Outcome, r.Reason = Returned, f.returned
		}
		if i >= late {
			p.resolve(r)
		} else if r.Outcome == Confirmed { // its chain went on without it
			p.report(r)
		}
	}
	if len(done) > 0 {
		p.metrics.LastConfirm.SetToCurrentTime()
	}
}

// matchReturns notes the broker's reason beside each returned message. Only the message-id tells
// which it is: a return carries no delivery tag.
func (p *AMQPPublisher) matchReturns(s *amqpSession, done []*flight) {
	if len(s.returns) == 0 {
		return
	}
	byID := make(map[string]*flight, len(done)+len(p.flights))
	for _, f := range slices.Concat(p.late, p.flights, done) {
		byID[f.event.ID] = f
	}
	for len(s.returns) > 0 {
		r := <-s.returns
		if f := byID[r.MessageId]; f != nil {
			f.returned = fmt.Sprintf("returned by the broker: %d %s (exchange %q, routing key %q)", r.ReplyCode, r.ReplyText, r.Exchange, r.RoutingKey)
		}
	}
}

// expire gives up on confirms that did not come in time.
func (p *AMQPPublisher) expire(s *amqpSession) error {
	now := s.clock.now()
	for len(p.flights) > 0 && now-p.flights[0].sent > p.cfg.ConfirmTimeout {
		f := p.flights[0]
		if s.confirms == f.seen {
			return errBrokerSilent
		}
		p.flights = slices.Delete(p.flights, 0, 1)
		p.late = append(p.late, f)
		p.resolve(Result{Event: f.event, Outcome: Late, Reason: "no confirm within " + p.cfg.ConfirmTimeout.String()})
	}
	return nil
}

// channelClosed finds the event that made the broker close ch, and opens it anew. The broker
// does not say which message it was: of several, each is then published alone until the guilty
// one is found. An error is returned when no single event is to blame, and means that the
// session is lost.
func (p *AMQPPublisher) channelClosed(s *amqpSession, ch *amqpChannel, closed *amqp.Error) error {
	if s.conn.IsClosed() || closed == nil {
		return connectionError(<-s.gone)
	}
	p.collect(s)
	if p.isOutage(closed) {
		return closed
	}
	var suspects []*Event
	p.flights = slices.DeleteFunc(p.flights, func(f *flight) bool {
		if f.channel != ch {
			return false
		}
		suspects = append(suspects, f.event)
		return true
	})
	p.late = slices.DeleteFunc(p.late, func(f *flight) bool { return f.channel == ch })
	reopened, err := s.open()
	if err != nil {
		return err
	}
	if ch == s.side {
		s.side = reopened
	} else {
		s.main = reopened
	}
	switch len(suspects) {
	case 0:
		return closed
	case 1:
		p.resolve(Result{Event: suspects[0], Outcome: Rejected, Reason: fmt.Sprintf("%s: %d %s", reasonChannelClosed, closed.Code, closed.Reason)})
		p.acquit()
	default:
		p.solo = append(suspects, p.solo...)
	}
	return nil
}

// reasonChannelClosed begins the last_error of an event that closed a channel. sql/claim.sql
// looks for it.
const reasonChannelClosed = "the broker closed the channel"

// acquit lets the events that were only suspected by their neighbourhood go with all others again.
func (p *AMQPPublisher) acquit() {
	var ready []*Event
	p.solo = slices.DeleteFunc(p.solo, func(e *Event) bool {
		if e.Isolate || p.suspects[e.ID] {
			return false
		}
		ready = append(ready, e)
		return true
	})
	p.ready = append(ready, p.ready...)
}

// isOutage reports whether the broker's reason for closing a channel holds for all events alike.
func (p *AMQPPublisher) isOutage(e *amqp.Error) bool {
	switch e.Code {
	case amqp.NotFound:
		return p.mapper.exchange.static()
	case amqp.AccessRefused:
		onlyThisKey := strings.Contains(e.Reason, "access to topic") && !p.mapper.key.static()
		return p.mapper.exchange.static() && !onlyThisKey
	default:
		return false
	}
}

// resolve reports r and moves the event's chain on.
func (p *AMQPPublisher) resolve(r Result) {
	delete(p.suspects, r.Event.ID)
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

// end discards s, which was lost because of err, and gives back what it held.
func (p *AMQPPublisher) end(s *amqpSession, err error) {
	p.collect(s)
	for _, f := range p.flights {
		r := Result{Event: f.event, Outcome: Unknown, Reason: err.Error()}
		if blamesMessage(err) {
			if len(p.flights) == 1 && p.suspects[f.event.ID] { // it was alone, twice
				r.Outcome, r.Reason = Rejected, fmt.Sprintf("the broker closed the connection: %v", err)
			} else {
				defer func() { p.suspects[f.event.ID] = true }()
			}
		}
		p.resolve(r)
	}
	p.flights, p.late = nil, nil
	p.release("session lost")
	p.deliver()
	p.setLink(Link{Err: err})
	if errors.Is(err, context.Canceled) {
		s.close()
	} else {
		s.abandon()
	}
}

// blamesMessage reports whether the broker closed the connection for something we sent, not for
// reasons of its own.
func blamesMessage(err error) bool {
	closed, ok := errors.AsType[*amqp.Error](err)
	return ok && closed.Server && closed.Code != amqp.ConnectionForced && closed.Code != amqp.InternalError
}

// connectionError is the reason the connection ended for; nil stands for an end without reason.
func connectionError(closed *amqp.Error) error {
	if closed == nil {
		return errBrokerClosed
	}
	return closed
}
