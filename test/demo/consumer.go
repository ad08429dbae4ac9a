package main

import (
	"context"
	"database/sql"
	"encoding/json"
	"errors"
	"fmt"
	"sync/atomic"
	"time"

	amqp "github.com/rabbitmq/amqp091-go"
)

const (
	exchange = "outbox" // AMQP_EXCHANGE of the relay
	queue    = "shop.orders"
	prefetch = 50
)

// errBrokenOff ends a session that the demo breaks off.
var errBrokenOff = errors.New("broken off")

// consumer has one effect for each event, however often that is delivered: a second delivery
// carries the same message-id.
type consumer struct {
	db    *sql.DB
	url   string
	tally *tally
	note  func(format string, args ...any)

	// Set from outside: to handle that many messages, ack none of them and drop the connection,
	// like a consumer that crashes between commit and ack.
	leaveUnacked atomic.Int64
}

// handle enters the message-id and has the effect, in one transaction. It returns false, and has no
// effect, when the id is there already. The caller acks in both cases, after the commit.
func (c *consumer) handle(ctx context.Context, d amqp.Delivery) (fresh bool, err error) {
	tx, err := c.db.BeginTx(ctx, nil)
	if err != nil {
		return false, fmt.Errorf("begin: %w", err)
	}
	defer func() { _ = tx.Rollback() }() // does nothing after Commit
	res, err := tx.ExecContext(ctx, `INSERT INTO processed_events (message_id) VALUES ($1) ON CONFLICT DO NOTHING`, d.MessageId)
	if err != nil {
		return false, fmt.Errorf("enter message-id: %w", err)
	}
	if n, err := res.RowsAffected(); err != nil || n == 0 {
		return false, err
	}
	// The effect, which stands for any other: a count, wrong if an event were counted twice.
	_, err = tx.ExecContext(ctx, `INSERT INTO order_counts AS c (event_type, events) VALUES ($1, 1)
		ON CONFLICT (event_type) DO UPDATE SET events = c.events + 1`, d.Type)
	if err != nil {
		return false, fmt.Errorf("count event: %w", err)
	}
	return true, tx.Commit()
}

// effects is how many events were counted so far.
func (c *consumer) effects(ctx context.Context) (n int, err error) {
	err = c.db.QueryRowContext(ctx, `SELECT coalesce(sum(events), 0) FROM order_counts`).Scan(&n)
	return n, err
}

// run consumes until ctx is done, over as many sessions as it takes. It sends to ready when the
// queue is there for the first time.
func (c *consumer) run(ctx context.Context, ready chan<- struct{}) {
	said := ""
	for ctx.Err() == nil {
		err := c.session(ctx, ready)
		if ctx.Err() != nil || errors.Is(err, errBrokenOff) {
			continue
		}
		if text := err.Error(); text != said {
			c.note("The consumer connects again: %s", text)
			said = text
		}
		time.Sleep(200 * time.Millisecond)
	}
}

// session consumes over one connection until something fails.
func (c *consumer) session(ctx context.Context, ready chan<- struct{}) error {
	conn, err := amqp.DialConfig(c.url, amqp.Config{Dial: amqp.DefaultDial(5 * time.Second)})
	if err != nil {
		return err
	}
	defer func() { _ = conn.Close() }()
	deliveries, err := subscribe(conn)
	if err != nil {
		return err
	}
	select {
	case ready <- struct{}{}:
	default: // said before
	}
	for unacked := int64(0); ; {
		var d amqp.Delivery
		var ok bool
		select {
		case <-ctx.Done():
			return ctx.Err()
		case d, ok = <-deliveries:
		}
		if !ok {
			return errors.New("connection lost")
		}
		arrived := time.Now()
		fresh, err := c.handle(ctx, d)
		if err != nil {
			return err // the message was not acked: it comes again
		}
		var o order // zero for what the shop has not written
		_ = json.Unmarshal(d.Body, &o)
		c.tally.delivered(d.MessageId, fresh, o, arrived)

		if limit := c.leaveUnacked.Load(); limit == 0 {
			if err := d.Ack(false); err != nil {
				return err
			}
		} else if unacked++; unacked >= limit {
			c.leaveUnacked.Store(0)
			c.note("The consumer drops its connection, on purpose, with %d messages handled but not acked: they come again.", unacked)
			return errBrokenOff
		}
	}
}

// subscribe declares what a consumer needs, the relay's exchange included, so that it does not
// matter which of the two starts first.
func subscribe(conn *amqp.Connection) (<-chan amqp.Delivery, error) {
	ch, err := conn.Channel()
	if err != nil {
		return nil, err
	}
	if err := ch.ExchangeDeclare(exchange, amqp.ExchangeTopic, true, false, false, false, nil); err != nil {
		return nil, err
	}
	if _, err := ch.QueueDeclare(queue, true, false, false, false, nil); err != nil {
		return nil, err
	}
	if err := ch.QueueBind(queue, "order.#", exchange, false, nil); err != nil {
		return nil, err
	}
	if err := ch.Qos(prefetch, 0, false); err != nil {
		return nil, err
	}
	return ch.Consume(queue, "", false, false, false, false, nil)
}
