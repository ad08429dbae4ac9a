package testenv

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"sync"
	"testing"
	"time"

	amqp "github.com/rabbitmq/amqp091-go"
)

// Binding says what a [Queue] receives.
type Binding struct {
	Queue        string     // "" is a name of its own
	Exchange     string     // declared durable; "" is the default exchange, which needs no binding
	ExchangeType string     // "" is topic
	Keys         []string   // none is "#"
	Args         amqp.Table // arguments of the queue: x-max-length, x-queue-type
	// Hold: leave the messages in the queue; Next and the like then see none.
	Hold bool
}

// Queue is a durable queue and what was received from it. It reconnects by itself, so it outlives a
// restart of the broker. Messages are acknowledged after they were noted: one may be noted again,
// marked Redelivered, if the link is cut in between. Safe for concurrent use.
type Queue struct {
	Name string

	url     string
	binding Binding
	cancel  context.CancelFunc
	ended   chan struct{}

	mu       sync.Mutex
	received []amqp.Delivery
	read     int           // how many of them Next has handed out
	changed  chan struct{} // closed and replaced with each delivery
}

// Consume binds a new queue to a durable topic exchange, which it declares, and receives from it until
// the test's end. Without keys it gets everything.
func Consume(t testing.TB, amqpURL, exchange string, keys ...string) *Queue {
	t.Helper()
	return ConsumeFrom(t, amqpURL, Binding{Exchange: exchange, Keys: keys})
}

// ConsumeFrom is Consume for other exchanges and queues.
func ConsumeFrom(t testing.TB, amqpURL string, b Binding) *Queue {
	t.Helper()
	if b.ExchangeType == "" {
		b.ExchangeType = amqp.ExchangeTopic
	}
	if len(b.Keys) == 0 {
		b.Keys = []string{"#"}
	}
	ctx, cancel := context.WithCancel(context.Background())
	q := &Queue{
		Name: cmp.Or(b.Queue, uniqueName(t)), url: amqpURL, binding: b, cancel: cancel,
		ended: make(chan struct{}), changed: make(chan struct{}),
	}
	conn, deliveries, err := q.open()
	if err != nil {
		cancel()
		t.Fatalf("consume from %s: %v", b.Exchange, err)
	}
	go q.run(ctx, conn, deliveries)
	t.Cleanup(func() {
		cancel()
		<-q.ended
	})
	return q
}

func (q *Queue) open() (conn *amqp.Connection, deliveries <-chan amqp.Delivery, err error) {
	conn, err = dialAMQP(q.url)
	if err != nil {
		return nil, nil, err
	}
	defer func() {
		if err != nil {
			_ = conn.Close()
		}
	}()
	ch, err := conn.Channel()
	if err != nil {
		return nil, nil, err
	}
	if q.binding.Exchange != "" {
		if err := ch.ExchangeDeclare(q.binding.Exchange, q.binding.ExchangeType, true, false, false, false, nil); err != nil {
			return nil, nil, err
		}
	}
	if _, err := ch.QueueDeclare(q.Name, true, false, false, false, q.binding.Args); err != nil {
		return nil, nil, err
	}
	for _, key := range q.binding.Keys {
		if q.binding.Exchange == "" {
			break
		}
		if err := ch.QueueBind(q.Name, key, q.binding.Exchange, false, nil); err != nil {
			return nil, nil, err
		}
	}
	if q.binding.Hold {
		return conn, nil, nil
	}
	if err := ch.Qos(1000, 0, false); err != nil {
		return nil, nil, err
	}
	deliveries, err = ch.Consume(q.Name, "", false, false, false, false, nil)
	return conn, deliveries, err
}

// run receives until ctx ends, over as many connections as it takes.
func (q *Queue) run(ctx context.Context, conn *amqp.Connection, deliveries <-chan amqp.Delivery) {
	defer close(q.ended)
	for {
		lost := conn.NotifyClose(make(chan *amqp.Error, 1))
		for open := true; open; {
			select {
			case <-ctx.Done():
				q.remove(conn)
				return
			case <-lost: //nolint:errcheck // why it was lost does not matter: it is opened again
				open = false
			case d, ok := <-deliveries:
				if !ok {
					open = false
					break
				}
				q.note(d)
				_ = d.Ack(false) // if the link is gone, the message comes again
			}
		}
		_ = conn.Close()
		err := retry(ctx, func(context.Context) (err error) {
			conn, deliveries, err = q.open()
			return err
		})
		if err != nil {
			return // only when ctx has ended
		}
	}
}

func (q *Queue) remove(conn *amqp.Connection) {
	if ch, err := conn.Channel(); err == nil {
		_, _ = ch.QueueDelete(q.Name, false, false, false) // the vhost goes too, mostly
	}
	_ = conn.Close()
}

func (q *Queue) note(d amqp.Delivery) {
	d.Acknowledger = nil // what a test gets is data; it is acknowledged already
	q.mu.Lock()
	defer q.mu.Unlock()
	q.received = append(q.received, d)
	close(q.changed)
	q.changed = make(chan struct{})
}

// Received returns all that came so far, in order.
func (q *Queue) Received() []amqp.Delivery {
	q.mu.Lock()
	defer q.mu.Unlock()
	return q.received[:len(q.received):len(q.received)]
}

// Next returns the first message that Next and Collect have not returned yet, and fails the test if
// there is none within timeout.
func (q *Queue) Next(t testing.TB, timeout time.Duration) amqp.Delivery {
	t.Helper()
	return q.Collect(t, 1, timeout)[0]
}

// Collect returns the next n messages, and fails the test if they do not come within timeout.
func (q *Queue) Collect(t testing.TB, n int, timeout time.Duration) []amqp.Delivery {
	t.Helper()
	var got []amqp.Delivery
	ctx, cancel := context.WithTimeout(context.Background(), timeout)
	defer cancel()
	err := q.until(ctx, func() bool {
		if len(q.received) < q.read+n {
			return false
		}
		got = q.received[q.read : q.read+n : q.read+n]
		q.read += n
		return true
	})
	if err != nil {
		t.Fatalf("queue %s: %v, want %d", q.Name, err, n)
	}
	return got
}

// WaitFor waits until cond holds for all messages received, and fails the test when it does not
// within timeout. cond must not call methods of q.
func (q *Queue) WaitFor(t testing.TB, timeout time.Duration, what string, cond func([]amqp.Delivery) bool) {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), timeout)
	defer cancel()
	if err := q.until(ctx, func() bool { return cond(q.received) }); err != nil {
		t.Fatalf("queue %s: waited in vain for %s: %v", q.Name, what, err)
	}
}

// Quiet fails the test if a message comes within d that Next and Collect have not returned.
func (q *Queue) Quiet(t testing.TB, d time.Duration) {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), d)
	defer cancel()
	var first amqp.Delivery
	err := q.until(ctx, func() bool {
		if len(q.received) == q.read {
			return false
		}
		first = q.received[q.read]
		return true
	})
	if !errors.Is(err, context.DeadlineExceeded) {
		t.Fatalf("queue %s: got message %s %q, want none", q.Name, first.MessageId, first.RoutingKey)
	}
}

// until waits until cond, which is called with the lock held, returns true.
func (q *Queue) until(ctx context.Context, cond func() bool) error {
	for {
		q.mu.Lock()
		ok, changed, n := cond(), q.changed, len(q.received)-q.read
		q.mu.Unlock()
		if ok {
			return nil
		}
		select {
		case <-changed:
		case <-ctx.Done():
			return fmt.Errorf("%w with %d messages waiting", ctx.Err(), n)
		}
	}
}
