package main

import (
	"context"
	"database/sql"
	"encoding/json"
	"fmt"
	"math/rand/v2"
	"strconv"
	"sync/atomic"
	"time"

	"golang.org/x/sync/errgroup"
)

const (
	workers            = 8 // transactions at a time
	transactionTimeout = 10 * time.Second
)

// shop is the application. It knows nothing of RabbitMQ: it changes its data, and says so in
// outbox_events in the same transaction.
type shop struct {
	db     *sql.DB
	tally  *tally
	recent [20]atomic.Int64 // ids of orders that may be changed
}

// order is a row of orders, and the payload of its events.
type order struct {
	ID      int64 `json:"order_id"`
	Version int   `json:"version"` // counts its changes
	Cents   int64 `json:"cents"`
}

// transact places an order, or changes the one with this id if there is one. The change comes before
// the event: its lock on the order puts the order's events in the sequence of its changes. One
// transaction in ten is rolled back at the end, as if the card had been declined.
func (s *shop) transact(ctx context.Context, id int64) error {
	tx, err := s.db.BeginTx(ctx, nil)
	if err != nil {
		return fmt.Errorf("begin: %w", err)
	}
	defer func() { _ = tx.Rollback() }() // does nothing after Commit

	eventType, args := "order.placed", []any{100 + rand.Int64N(10_000)}
	statement := `INSERT INTO orders (cents) VALUES ($1) RETURNING id, version, cents`
	if id != 0 {
		eventType, args = "order.changed", []any{1 + rand.Int64N(1000), id}
		statement = `UPDATE orders SET cents = cents + $1, version = version + 1 WHERE id = $2 RETURNING id, version, cents`
	}
	var o order
	if err := tx.QueryRowContext(ctx, statement, args...).Scan(&o.ID, &o.Version, &o.Cents); err != nil {
		return fmt.Errorf("%s: %w", eventType, err)
	}
	event, err := writeEvent(ctx, tx, eventType, o)
	if err != nil {
		return fmt.Errorf("write event: %w", err)
	}
	if rand.IntN(10) == 0 {
		s.tally.rolledBack(event)
		return tx.Rollback()
	}
	if err := tx.Commit(); err != nil {
		return fmt.Errorf("commit: %w", err)
	}
	s.tally.committed(event, time.Now())
	s.recent[o.ID%int64(len(s.recent))].Store(o.ID)
	return nil
}

// writeEvent is all that an application does for the relay. It returns the event's id, which becomes
// the message-id, only because the demo keeps count.
func writeEvent(ctx context.Context, tx *sql.Tx, eventType string, o order) (id string, err error) {
	payload, err := json.Marshal(o)
	if err != nil {
		return "", err
	}
	err = tx.QueryRowContext(ctx, `INSERT INTO outbox_events (aggregate_type, aggregate_id, event_type, payload)
		VALUES ('order', $1, $2, $3) RETURNING id`, strconv.FormatInt(o.ID, 10), eventType, payload).Scan(&id)
	return id, err
}

// run begins rate transactions a second until ctx is done or one fails, and finishes those begun.
func (s *shop) run(ctx context.Context, rate int) error {
	group, ctx := errgroup.WithContext(ctx)
	group.SetLimit(workers)
	next := time.NewTicker(time.Second / time.Duration(rate))
	defer next.Stop()
	for {
		select {
		case <-ctx.Done():
			return group.Wait()
		case <-next.C:
			group.Go(func() error {
				ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), transactionTimeout)
				defer cancel()
				var id int64 // a new order, one time in three
				if rand.IntN(3) > 0 {
					id = s.recent[rand.IntN(len(s.recent))].Load()
				}
				return s.transact(ctx, id)
			})
		}
	}
}
