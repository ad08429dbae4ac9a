package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"sync"
	"time"

	"outbox-relay/internal/serverurl"

	"github.com/cenkalti/backoff/v5"
	amqp "github.com/rabbitmq/amqp091-go"
)

const (
	// sweepInterval is how often confirms behind a slow one are looked for. Confirms mostly come
	// in order, so the oldest is waited for and the others are found in passing.
	sweepInterval = 2 * time.Millisecond
	// steadyFlights is how many messages are in flight at most while confirms take less than slowConfirm.
	steadyFlights = 256
	slowConfirm   = 50 * time.Millisecond
	// doubtTime is for how long a link is doubted while there is nothing that could prove it.
	doubtTime = 5 * time.Second
	// leaseRecheck is how often a lapsed lease is looked at again.
	leaseRecheck = 100 * time.Millisecond
	// reconnectMin and reconnectMax bound the pause between attempts to connect: short enough
	// that a broker that is back is used at once, for people.
	reconnectMin = 100 * time.Millisecond
	reconnectMax = 500 * time.Millisecond
)

var (
	errBrokerMute   = errors.New("the broker neither confirmed nor answered anything within CONFIRM_TIMEOUT")
	errBrokerClosed = errors.New("connection closed")
)

// Link says whether events can be published. The zero value means that no connection was made yet.
type Link struct {
	Up      bool
	Blocked string // the broker's reason for not accepting messages now, "" when it does
	// Err says why the link is not up, or if it is, why the one before was lost without a single
	// confirm: until there is one, nothing is known to be better. nil otherwise, and before the first try.
	Err error
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
	inbox   []request
	results []Result
	link    Link

	failures *repeatLog           // of sessions
	doubt    error                // a session that had messages in flight was lost for this without a confirm
	out      []Result             // reported, not yet visible to Take
	chains   map[Aggregate]*chain // aggregates with events in hand; unused when ORDERING=none
	ready    []*Event             // may be written now
	solo     []*Event             // to be published alone, one after the other
	flights  []*flight            // written, unconfirmed, in the order of writing
	late     []*flight            // reported Late; a confirm still counts
	accused  map[string]bool      // ids that were in flight when the broker closed the connection
	closings map[string]int       // by id: channels the broker closed with the event in flight
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
		chains: make(map[Aggregate]*chain), accused: make(map[string]bool), closings: make(map[string]int),
	}, nil
}

// Run connects, publishes and reconnects until ctx is done, then says goodbye to the broker
// within a second. What is in flight by then is Unknown.
func (p *AMQPPublisher) Run(ctx context.Context) {
	pause := backoff.NewExponentialBackOff()
	pause.InitialInterval, pause.MaxInterval = reconnectMin, reconnectMax
	p.failures = &repeatLog{log: p.log.With(keyServer, PeerRabbitMQ), what: "use RabbitMQ"}
	connected := false // once before
	for host := 0; ctx.Err() == nil; host++ {
		s, hosts, err := p.connect(ctx, host)
		if err != nil {
			p.setLink(Link{Err: err})
		} else {
			if connected {
				p.metrics.Reconnects[PeerRabbitMQ].Inc()
			}
			connected = true
			p.setLink(Link{Up: true, Err: p.doubt})
			if p.doubt == nil {
				p.failures.OK()
			}
			err = p.serve(ctx, s)
			if s.confirms > 0 {
				pause.Reset()
			} else if len(p.flights) > 0 {
				p.doubt = err
			}
			p.end(s, err)
		}
		if ctx.Err() != nil {
			break
		}
		p.failures.Failed(err)
		p.metrics.ConnectionFailures[PeerRabbitMQ].Inc()
		if (host+1)%max(hosts, 1) == 0 { // each address was tried
			sleep(ctx, pause.NextBackOff())
		}
	}
}

// connect makes a session with one of the hosts of AMQP_URL, which is read anew each time, and
// says how many there are. Meanwhile it gives back what is handed over: a broker that accepts the
// connection and then says nothing would hold it for as long as the attempt may take.
func (p *AMQPPublisher) connect(ctx context.Context, host int) (s *amqpSession, hosts int, err error) {
	urls, err := p.cfg.amqpURLs()
	if err != nil {
		p.giveBack()
		return nil, 0, err
	}
	url := urls[host%len(urls)]
	exchange, _ := p.mapper.staticExchange() // one that differs between events cannot be declared beforehand
	dialled := make(chan struct{})
	go func() {
		s, err = dialAMQP(ctx, url, p.cfg, exchange, p.maxInFlight(), p.onBlocked)
		close(dialled)
	}()
	for {
		p.giveBack()
		select {
		case <-p.wake:
			continue
		case <-dialled:
		}
		if err != nil {
			return nil, len(urls), fmt.Errorf("connect to %s: %w", serverurl.RedactAMQP(url), err)
		}
		return s, len(urls), nil
	}
}

// giveBack releases all that was handed over, while there is no session.
func (p *AMQPPublisher) giveBack() {
	p.accept()
	p.release("no connection to the broker")
	p.deliver()
}

// maxInFlight is how many messages may wait for a confirm: what the relay claims at most while
// half a batch is out, and as many late ones again.
func (p *AMQPPublisher) maxInFlight() int { return 4 * p.cfg.BatchSize }

func (p *AMQPPublisher) setLink(l Link) {
	p.updateLink(func(link *Link) { *link = l })
}

// updateLink changes the link's state: the publisher's goroutine and a session's watcher both do.
func (p *AMQPPublisher) updateLink(change func(*Link)) {
	p.mu.Lock()
	change(&p.link)
	set01(p.metrics.Connected[PeerRabbitMQ], p.link.Up)
	set01(p.metrics.Blocked, p.link.Blocked != "")
	p.mu.Unlock()
	p.bell.Ring()
}

// onBlocked runs in the session's watcher.
func (p *AMQPPublisher) onBlocked(b amqp.Blocking) {
	blocked := ""
	if b.Active {
		blocked = cmp.Or(b.Reason, "blocked")
		p.log.Warn("RabbitMQ accepts no messages for now", "reason", blocked)
	} else {
		p.log.Info("RabbitMQ accepts messages again")
	}
	p.updateLink(func(l *Link) { l.Blocked = blocked })
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
		if err := s.answered(); err != nil {
			return err
		}
		p.collect(s, time.Since(s.swept) >= sweepInterval) // after the answer, which came behind the confirms
		p.settleDoubt(s)
		if err := p.expire(s); err != nil {
			return err
		}
	}
}

// settleDoubt believes in the link again: after a confirm, or when there was nothing to confirm for a while.
func (p *AMQPPublisher) settleDoubt(s *amqpSession) {
	idle := len(p.flights)+len(p.ready)+len(p.solo) == 0 && s.clock.now() > doubtTime
	if p.doubt == nil || s.confirms == 0 && !idle {
		return
	}
	p.doubt = nil
	p.failures.OK()
	p.updateLink(func(l *Link) { l.Err = nil })
}

// patience is how long serve may sleep when nothing happens.
func (p *AMQPPublisher) patience(s *amqpSession) time.Duration {
	switch {
	case p.blocked(): // no confirm is expected, and the end of it rings
		return leaseRecheck
	case p.doubt != nil:
		return sweepInterval
	case len(p.flights) > 1 || len(p.late) > 0 && len(p.flights) > 0:
		return sweepInterval
	case len(p.ready)+len(p.solo) > 0: // held back by the lease or the blocked broker
		return leaseRecheck
	case len(p.flights) == 1:
		left := p.cfg.ConfirmTimeout - (s.clock.now() - p.flights[0].sent)
		if half := p.cfg.ConfirmTimeout / 2; left > half {
			left -= half // see expire
		}
		return max(left, sweepInterval)
	case len(p.late) > 0:
		return leaseRecheck
	default:
		return time.Hour
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
		if !p.mayWrite(s) || !p.mayPublish() {
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

// mayWrite reports whether one more message may be in flight. RabbitMQ's processes grant each other credit for
// 400 messages and stop to wait when it is used up: it takes more in the same time when fewer are
// before it. Where confirms take long, more must be in flight to make use of that time.
func (p *AMQPPublisher) mayWrite(s *amqpSession) bool {
	n := len(p.flights)
	if n+len(p.late) >= s.maxInFlight {
		return false
	}
	return n < steadyFlights || s.clock.now()-p.flights[0].sent > slowConfirm
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
	f := &flight{event: e, channel: ch, sent: s.clock.now()}
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

// end discards s, which was lost because of err, and gives back what it held.
func (p *AMQPPublisher) end(s *amqpSession, err error) {
	p.collect(s, true)
	var accused []string
	for _, f := range p.flights {
		r := Result{Event: f.event, Outcome: Unknown, Reason: err.Error()}
		if blamesMessage(err) {
			if len(p.flights) == 1 && p.accused[f.event.ID] { // it was alone, twice
				r.Outcome, r.Reason = Rejected, fmt.Sprintf("the broker closed the connection: %v", err)
			} else {
				accused = append(accused, f.event.ID)
			}
		}
		p.resolve(r)
	}
	for _, id := range accused { // resolving forgets them
		p.accused[id] = true
	}
	p.flights, p.late = nil, nil
	p.release("session lost")
	p.deliver()
	if errors.Is(err, context.Canceled) {
		s.close()
	} else {
		s.abandon()
	}
	p.setLink(Link{Err: err}) // after the session's watcher has ended
}
