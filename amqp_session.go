package main

import (
	"context"
	"fmt"
	"net"
	"sync"
	"time"

	amqp "github.com/rabbitmq/amqp091-go"

	"outbox-relay/internal/boundedconn"
)

const (
	// amqpSetupTimeout bounds everything between dialling and the first publish.
	amqpSetupTimeout = 10 * time.Second
	// amqpCloseTimeout is how long a healthy session may take to say goodbye.
	amqpCloseTimeout = time.Second
)

// amqpSession is one connection to the broker with its channels in confirm mode. It is never
// repaired: any error of the connection discards it whole. Only a channel that the broker closed
// because of a message is opened anew, since that says nothing about the connection.
//
// Owned by the publisher's goroutine. A watcher of its own follows connection.blocked, because
// the publisher may be held in a write just then.
type amqpSession struct {
	conn        *amqp.Connection
	raw         *boundedconn.Conn
	gone        chan *amqp.Error // the connection ended; closed without a value when we closed it
	watcher     sync.WaitGroup
	clock       pausableClock
	main        *amqpChannel
	side        *amqpChannel // for events that are published alone; nil until needed
	maxInFlight int
	confirms    int       // confirms seen
	swept       time.Time // when all that is in flight was last looked at

	heard time.Duration // on clock: the broker worked then, which a confirm or an answer has shown
	asked time.Duration // on clock: when the question under way was asked
	reply chan error    // its answer; nil when none is under way
	// question asks it and waits; openAndClose but in tests.
	question func() error
}

// amqpChannel is a channel in confirm mode. Its Go channels are its own: the library closes them
// with it.
type amqpChannel struct {
	*amqp.Channel
	closed  chan *amqp.Error
	returns chan amqp.Return // holds all messages in flight at once: what does not fit, the library drops
}

// dialAMQP connects to the broker at url and prepares a session for publishing to exchange; an
// empty exchange is one that needs no preparation. At most maxInFlight messages may be without a
// confirm at any time. The caller closes the session.
func dialAMQP(ctx context.Context, url string, cfg Config, exchange string, maxInFlight int, onBlocked func(amqp.Blocking)) (*amqpSession, error) {
	s := &amqpSession{
		gone:        make(chan *amqp.Error, 1),
		clock:       newPausableClock(),
		maxInFlight: maxInFlight,
	}
	ctx, cancel := context.WithTimeout(ctx, amqpSetupTimeout)
	defer cancel()
	// The library's calls know no context. Closing the socket below it ends them.
	var rawMu sync.Mutex
	stop := context.AfterFunc(ctx, func() {
		rawMu.Lock()
		defer rawMu.Unlock()
		if s.raw != nil {
			_ = s.raw.Close()
		}
	})
	defer stop()

	conn, err := amqp.DialConfig(url, amqp.Config{
		Dial: func(network, addr string) (net.Conn, error) {
			d := net.Dialer{KeepAliveConfig: boundedconn.KeepAlive}
			c, err := d.DialContext(ctx, network, addr)
			if err != nil {
				return nil, err
			}
			deadline, _ := ctx.Deadline()
			raw := boundedconn.New(c, 0, cfg.ConfirmTimeout)
			rawMu.Lock()
			s.raw = raw
			rawMu.Unlock()
			return raw, raw.SetDeadline(deadline)
		},
		Properties: amqp.Table{"connection_name": "outbox-relay", "product": "outbox-relay", "version": version},
	})
	if err != nil {
		s.abandon()
		return nil, err
	}
	s.conn, s.question = conn, s.openAndClose
	s.conn.NotifyClose(s.gone)
	blocked := s.conn.NotifyBlocked(make(chan amqp.Blocking, 1))
	s.watcher.Go(func() {
		for b := range blocked { // ends when the connection does
			s.raw.SetPatient(b.Active)
			s.clock.pause(b.Active)
			onBlocked(b)
		}
	})
	// From here on the library's own read deadline is not wanted: it expires while a publish is
	// held in a write, although the broker's heartbeats keep coming.
	if err := s.raw.OwnReads(max(amqpSetupTimeout, 2*s.conn.Config.Heartbeat)); err != nil {
		s.close()
		return nil, err
	}
	if s.main, err = s.open(); err != nil {
		s.close()
		return nil, err
	}
	if err := s.prepareExchange(cfg, exchange); err != nil {
		s.close()
		return nil, err
	}
	return s, nil
}

// prepareExchange declares the exchange, or checks that it exists.
func (s *amqpSession) prepareExchange(cfg Config, exchange string) error {
	switch {
	case exchange == "":
		return nil
	case cfg.AMQPDeclare && !isBuiltinExchange(exchange):
		if err := s.main.ExchangeDeclare(exchange, cfg.AMQPExchangeType, true, false, false, false, nil); err != nil {
			return fmt.Errorf("declare exchange %q as durable %s: %w", exchange, cfg.AMQPExchangeType, err)
		}
	default:
		if err := s.main.ExchangeDeclarePassive(exchange, cfg.AMQPExchangeType, true, false, false, false, nil); err != nil {
			return fmt.Errorf("check exchange %q: %w", exchange, err)
		}
	}
	return nil
}

// open opens a channel in confirm mode. A broker that does not answer in time costs the connection: heartbeats come
// also from one that reads nothing because of an alarm.
func (s *amqpSession) open() (*amqpChannel, error) {
	timer := time.AfterFunc(amqpSetupTimeout, func() { _ = s.raw.Close() })
	defer timer.Stop()
	ch, err := s.conn.Channel()
	if err != nil {
		return nil, fmt.Errorf("open channel: %w", err)
	}
	c := &amqpChannel{
		Channel: ch,
		closed:  ch.NotifyClose(make(chan *amqp.Error, 1)),
		returns: ch.NotifyReturn(make(chan amqp.Return, s.maxInFlight)),
	}
	if err := ch.Confirm(false); err != nil {
		return nil, fmt.Errorf("select confirm mode: %w", err)
	}
	return c, nil
}

// ask makes the broker answer something, in reply, to learn whether it still does. It does not wait.
func (s *amqpSession) ask() {
	s.asked = s.clock.now()
	reply := make(chan error, 1)
	s.reply = reply
	s.watcher.Go(func() { reply <- s.question() }) // with the connection it ends
}

// openAndClose is a question that costs the broker little and is answered behind all confirms that
// it has sent.
func (s *amqpSession) openAndClose() error {
	ch, err := s.conn.Channel()
	if err != nil {
		return err
	}
	return ch.Close()
}

// answered takes note of the broker's answer, if it has come.
func (s *amqpSession) answered() error {
	select {
	case err := <-s.reply:
		s.reply = nil
		if err != nil {
			return fmt.Errorf("ask the broker whether it still answers: %w", err)
		}
		s.heard = max(s.heard, s.asked)
	default:
	}
	return nil
}

// close ends the session politely where the link allows it, and in any case within a second.
func (s *amqpSession) close() {
	if s.conn != nil && !s.conn.IsClosed() {
		timer := time.AfterFunc(amqpCloseTimeout, func() { _ = s.raw.Close() })
		_ = s.conn.CloseDeadline(time.Now().Add(amqpCloseTimeout))
		timer.Stop()
	}
	s.abandon()
}

// abandon cuts the connection without a word and waits until its goroutines know.
func (s *amqpSession) abandon() {
	if s.raw != nil {
		_ = s.raw.Close()
	}
	if s.conn != nil {
		_ = s.conn.CloseDeadline(time.Now()) // returns at once: the socket is closed
	}
	s.watcher.Wait()
}

// isBuiltinExchange reports whether the broker owns the exchange, so that it cannot be declared.
func isBuiltinExchange(name string) bool { return len(name) >= 4 && name[:4] == "amq." }

// pausableClock measures time that stands still while the broker is blocked: no confirm can
// be expected then. Safe for concurrent use.
type pausableClock struct {
	mu      *sync.Mutex
	start   time.Time
	paused  time.Duration // total of ended pauses
	pausing time.Time     // start of the present pause, or zero
}

func newPausableClock() pausableClock {
	return pausableClock{mu: new(sync.Mutex), start: time.Now()}
}

func (c *pausableClock) now() time.Duration {
	c.mu.Lock()
	defer c.mu.Unlock()
	if !c.pausing.IsZero() {
		return c.pausing.Sub(c.start) - c.paused
	}
	return time.Since(c.start) - c.paused
}

func (c *pausableClock) pause(on bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	switch {
	case on && c.pausing.IsZero():
		c.pausing = time.Now()
	case !on && !c.pausing.IsZero():
		c.paused += time.Since(c.pausing)
		c.pausing = time.Time{}
	}
}
