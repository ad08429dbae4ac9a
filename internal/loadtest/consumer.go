package loadtest

import (
	"context"
	"fmt"
	"math/rand/v2"
	"sync"
	"testing"
	"time"

	amqp "github.com/rabbitmq/amqp091-go"
)

// Delivery is what a Consumer keeps of a message.
type Delivery struct {
	ID          ID
	At          time.Time
	Redelivered bool // the broker may have delivered it before: that is no copy of the relay's
}

// Consumer receives from a durable queue of its own, over as many connections as it takes. A message
// is acknowledged after it was noted. Safe for concurrent use.
type Consumer struct {
	url, exchange, queue string
	cancel               context.CancelFunc
	ended                chan struct{}

	mu         sync.Mutex // guards the fields below
	deliveries []Delivery
	foreign    []string // message-ids that are no UUIDs
}

// Consume binds a queue to all messages of a durable topic exchange, which it declares, and receives
// until the test's end.
func Consume(t testing.TB, amqpURL, exchange string) *Consumer {
	t.Helper()
	ctx, cancel := context.WithCancel(context.Background())
	c := &Consumer{
		url: amqpURL, exchange: exchange, queue: fmt.Sprintf("loadtest_%08x", rand.Uint32()),
		cancel: cancel, ended: make(chan struct{}),
	}
	conn, messages, err := c.open()
	if err != nil {
		cancel()
		t.Fatalf("consume from %s: %v", exchange, err)
	}
	go c.run(ctx, conn, messages)
	t.Cleanup(func() {
		cancel()
		<-c.ended
	})
	return c
}

func (c *Consumer) open() (_ *amqp.Connection, _ <-chan amqp.Delivery, err error) {
	conn, err := amqp.DialConfig(c.url, amqp.Config{Dial: amqp.DefaultDial(5 * time.Second)})
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
	if err := ch.ExchangeDeclare(c.exchange, amqp.ExchangeTopic, true, false, false, false, nil); err != nil {
		return nil, nil, err
	}
	if _, err := ch.QueueDeclare(c.queue, true, false, false, false, nil); err != nil {
		return nil, nil, err
	}
	if err := ch.QueueBind(c.queue, "#", c.exchange, false, nil); err != nil {
		return nil, nil, err
	}
	if err := ch.Qos(1000, 0, false); err != nil {
		return nil, nil, err
	}
	messages, err := ch.Consume(c.queue, "", false, false, false, false, nil)
	return conn, messages, err
}

func (c *Consumer) run(ctx context.Context, conn *amqp.Connection, messages <-chan amqp.Delivery) {
	defer close(c.ended)
	for {
		for open := true; open; {
			select {
			case <-ctx.Done():
				_ = conn.CloseDeadline(time.Now().Add(time.Second))
				return
			case m, ok := <-messages:
				if open = ok; ok {
					c.note(m)
					_ = m.Ack(false) // if the link is gone, the message comes again
				}
			}
		}
		_ = conn.CloseDeadline(time.Now())
		for {
			var err error
			if conn, messages, err = c.open(); err == nil {
				break
			}
			select {
			case <-ctx.Done():
				return
			case <-time.After(20 * time.Millisecond):
			}
		}
	}
}

func (c *Consumer) note(m amqp.Delivery) {
	now := time.Now()
	id, err := ParseID(m.MessageId)
	c.mu.Lock()
	defer c.mu.Unlock()
	if err != nil {
		c.foreign = append(c.foreign, m.MessageId)
		return
	}
	c.deliveries = append(c.deliveries, Delivery{ID: id, At: now, Redelivered: m.Redelivered})
}

// Received returns the deliveries from the nth on, in the order in which they came.
func (c *Consumer) Received(n int) []Delivery {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.deliveries[n:len(c.deliveries):len(c.deliveries)]
}

// Count returns how many deliveries there were.
func (c *Consumer) Count() int {
	c.mu.Lock()
	defer c.mu.Unlock()
	return len(c.deliveries)
}

// Foreign returns message-ids that cannot be an outbox's.
func (c *Consumer) Foreign() []string {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.foreign
}
