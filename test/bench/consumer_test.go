package bench

import (
	"bytes"
	"fmt"
	"math/rand/v2"
	"sync/atomic"
	"testing"
	"time"

	amqp "github.com/rabbitmq/amqp091-go"
)

// consumer notes when each event reached a durable queue, which is removed at the end. It does as little
// as it can, without acks, so that it is not what is measured.
type consumer struct {
	at         []atomic.Int64 // by the event's number: nanoseconds after epoch; 0: not here yet
	aggregates int
	newest     []int // by aggregate: the highest number so far; only the receiving goroutine's

	received   atomic.Int64 // messages
	different  atomic.Int64 // of these, events that had not come before
	disordered atomic.Int64 // events that came after a later one of their aggregate
	last       atomic.Int64 // when the last one came
}

// consume receives the events of a batch; of others it only counts the messages.
func consume(t *testing.T, o outbox, b batch) *consumer {
	t.Helper()
	c := &consumer{at: make([]atomic.Int64, b.events), aggregates: b.aggregates, newest: make([]int, b.aggregates)}
	ch := channel(t, dial(t, o.amqpURL))
	queue := fmt.Sprintf("bench_%08x", rand.Uint32())
	args := amqp.Table{}
	if b.queueType != "" {
		args[amqp.QueueTypeArg] = b.queueType
	}
	if _, err := ch.QueueDeclare(queue, true, false, false, false, args); err != nil {
		t.Fatal(err)
	}
	if err := ch.QueueBind(queue, "#", exchange, false, nil); err != nil {
		t.Fatal(err)
	}
	messages, err := ch.Consume(queue, "", true, false, false, false, nil)
	if err != nil {
		t.Fatal(err)
	}
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		for m := range messages {
			c.note(m)
		}
	}()
	t.Cleanup(func() {
		_, _ = ch.QueueDelete(queue, false, false, false) // also ends the consumer
		_ = ch.Close()
		<-ended
	})
	return c
}

func (c *consumer) note(m amqp.Delivery) {
	at := int64(now())
	c.last.Store(at)
	c.received.Add(1)
	n := number(m.Body)
	if n < 0 || n >= len(c.at) || !c.at[n].CompareAndSwap(0, at) {
		return
	}
	c.different.Add(1)
	if newest := &c.newest[n%c.aggregates]; n < *newest {
		c.disordered.Add(1)
	} else {
		*newest = n
	}
}

// body returns the payload of an event, as PostgreSQL prints it.
func body(n int, pad string) string { return fmt.Sprintf(`{"n": %d, "pad": "%s"}`, n, pad) }

// number returns what body was made with, or -1.
func number(body []byte) int {
	digits, ok := bytes.CutPrefix(body, []byte(`{"n": `))
	if !ok || len(digits) == 0 || digits[0] < '0' || digits[0] > '9' {
		return -1
	}
	n := 0
	for _, d := range digits {
		if d < '0' || d > '9' {
			break
		}
		n = 10*n + int(d-'0')
	}
	return n
}

// padding is random, lest it be compressed: it makes a body of that many bytes.
func padding(bytes int) string {
	const letters = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_-"
	b := make([]byte, max(0, bytes-len(body(10_000, ""))))
	for i := range b {
		b[i] = letters[rand.IntN(len(letters))]
	}
	return string(b)
}

// patience is how long nothing may come before events count as lost.
const patience = 30 * time.Second

// await waits until all events are here, calling each now and then, and fails if one is missing or came
// twice.
func (c *consumer) await(t *testing.T, each func()) {
	t.Helper()
	c.awaitUntil(t, each, func() bool { return c.different.Load() == int64(len(c.at)) })
	if got, want := c.received.Load(), int64(len(c.at)); got != want {
		t.Errorf("%d messages for %d events", got, want)
	}
}

func (c *consumer) awaitUntil(t *testing.T, each func(), done func() bool) {
	t.Helper()
	begun := now()
	for !done() {
		if quiet := now() - max(begun, time.Duration(c.last.Load())); quiet > patience {
			t.Fatalf("lost: %d of %d events have come, and none for %v", c.different.Load(), len(c.at), patience)
		}
		time.Sleep(5 * time.Millisecond)
		if each != nil {
			each()
		}
	}
}
