package test

import (
	"context"
	"database/sql"
	"math/rand/v2"
	"strconv"
	"sync"
	"sync/atomic"
	"testing"
	"time"
)

const (
	loadWriters    = 4
	loadAggregates = 20
)

// load is an application under use: writers that change aggregates, each transaction with its
// events, as fast as a pause of a few milliseconds allows.
type load struct {
	stopped chan struct{}
	writers sync.WaitGroup
	events  atomic.Int64 // whose transaction is known to be committed

	mu         sync.Mutex // guards rolledBack
	rolledBack map[string]bool
}

// startLoad begins to write. Errors of the server do not end it: an application goes on as well.
func (o *outbox) startLoad(t *testing.T) *load {
	t.Helper()
	_, err := o.db.ExecContext(t.Context(),
		`CREATE TABLE IF NOT EXISTS orders (id int PRIMARY KEY, version int NOT NULL DEFAULT 0);
		 INSERT INTO orders SELECT generate_series(1, `+strconv.Itoa(loadAggregates)+`) ON CONFLICT DO NOTHING`)
	if err != nil {
		t.Fatal(err)
	}
	l := &load{stopped: make(chan struct{}), rolledBack: make(map[string]bool)}
	for range loadWriters {
		l.writers.Go(func() { l.write(o.db) })
	}
	t.Cleanup(l.stop)
	return l
}

func (l *load) write(db *sql.DB) {
	for {
		select {
		case <-l.stopped:
			return
		case <-time.After(time.Duration(1+rand.IntN(8)) * time.Millisecond):
		}
		_ = l.transact(db) // an outage; the next one may succeed
	}
}

// transact changes one aggregate, or sometimes two, and writes up to five events. The update
// locks the aggregate before its events get their place in the outbox. One in ten is rolled back.
func (l *load) transact(db *sql.DB) error {
	ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
	defer cancel()
	tx, err := db.BeginTx(ctx, nil)
	if err != nil {
		return err
	}
	defer func() { _ = tx.Rollback() }()
	var ids []string
	first := 1 + rand.IntN(loadAggregates-1)
	for aggregate := first; aggregate <= first+rand.IntN(2); aggregate++ { // upwards, lest two deadlock
		if _, err := tx.ExecContext(ctx, `UPDATE orders SET version = version + 1 WHERE id = $1`, aggregate); err != nil {
			return err
		}
		for range 1 + rand.IntN(3) {
			var id string
			err := tx.QueryRowContext(ctx,
				`INSERT INTO outbox_events (aggregate_type, aggregate_id, event_type, payload)
				 VALUES ('order', $1, 'order.changed', '{"a": 1}') RETURNING id`, aggregate).Scan(&id)
			if err != nil {
				return err
			}
			ids = append(ids, id)
		}
	}
	if rand.IntN(10) == 0 {
		l.mu.Lock()
		for _, id := range ids {
			l.rolledBack[id] = true
		}
		l.mu.Unlock()
		return tx.Rollback()
	}
	if err := tx.Commit(); err != nil {
		return err
	}
	l.events.Add(int64(len(ids)))
	return nil
}

// stop ends the writers and waits for them. Safe to call twice.
func (l *load) stop() {
	select {
	case <-l.stopped:
	default:
		close(l.stopped)
	}
	l.writers.Wait()
}
