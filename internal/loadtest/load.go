// Package loadtest puts an outbox under load and says whether all of it arrived: a [Load] writes as
// an application does, a [Consumer] notes what reaches a queue, and an [Oracle] compares the two.
//
// All three outlive outages of their servers. They keep little of each event, so that a run may
// take hours.
package loadtest

import (
	"context"
	"database/sql"
	"encoding/hex"
	"fmt"
	"math/rand/v2"
	"net/url"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	_ "github.com/lib/pq" // the driver "postgres"
)

// Config says how much load there is. All fields must be set.
type Config struct {
	DSN         string        // of a migrated outbox, as a URL
	Writers     int           // which commit at once
	LateWriters int           // whose transactions stay open for up to five seconds
	Aggregates  int           // shared by the writers; each late writer has one of its own besides
	Pause       time.Duration // mean pause between a writer's transactions
}

// Load is an application under use: writers that change aggregates, each transaction with its
// events. A writer updates the aggregate's row before it inserts, and so holds the lock that puts
// the events of an aggregate in order. One transaction in ten is rolled back.
//
// Errors of the server do not end it: an application goes on as well. Safe for concurrent use.
type Load struct {
	cfg     Config
	db      *sql.DB
	cancel  context.CancelFunc
	writers sync.WaitGroup

	running    sync.RWMutex // read-locked by each transaction, locked while paused
	rolledBack atomic.Int64 // events
	failed     atomic.Int64 // transactions that ended in an error

	mu      sync.Mutex       // guards commits
	commits map[ID]time.Time // since the last Forget: when the commit was asked for
}

// ID is an event's id, its message-id.
type ID [16]byte

// ParseID parses the usual form of a UUID.
func ParseID(s string) (ID, error) {
	var id ID
	b, err := hex.DecodeString(strings.ReplaceAll(s, "-", ""))
	if err != nil || len(b) != len(id) {
		return id, fmt.Errorf("%q is no UUID", s)
	}
	return ID(b), nil
}

func (id ID) String() string {
	return fmt.Sprintf("%x-%x-%x-%x-%x", id[:4], id[4:6], id[6:8], id[8:10], id[10:])
}

// Start begins to write, until Stop or the test's end.
func Start(t testing.TB, cfg Config) *Load {
	t.Helper()
	db, err := openDB(cfg.DSN)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = db.Close() })
	_, err = db.ExecContext(t.Context(), fmt.Sprintf(
		`CREATE TABLE IF NOT EXISTS orders (id int PRIMARY KEY, version int NOT NULL DEFAULT 0);
		 INSERT INTO orders SELECT generate_series(1, %d) ON CONFLICT DO NOTHING`, cfg.Aggregates+cfg.LateWriters))
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	l := &Load{cfg: cfg, db: db, cancel: cancel, commits: make(map[ID]time.Time)}
	for range cfg.Writers {
		l.writers.Go(func() { l.write(ctx, l.transact) })
	}
	for i := range cfg.LateWriters {
		aggregate := cfg.Aggregates + 1 + i // its own, or the others would wait for its lock
		l.writers.Go(func() {
			l.write(ctx, func() error {
				return l.transaction(time.Duration(rand.Int64N(int64(5*time.Second))), aggregate)
			})
		})
	}
	t.Cleanup(l.Stop)
	return l
}

func (l *Load) write(ctx context.Context, transact func() error) {
	for {
		pause := time.Duration(rand.Int64N(int64(2*l.cfg.Pause) + 1))
		select {
		case <-ctx.Done():
			return
		case <-time.After(pause):
		}
		l.running.RLock()
		if ctx.Err() == nil && transact() != nil {
			l.failed.Add(1)
		}
		l.running.RUnlock()
	}
}

// transact changes one aggregate or two.
func (l *Load) transact() error {
	first := 1 + rand.IntN(l.cfg.Aggregates)
	if second := first + 1; second <= l.cfg.Aggregates && rand.IntN(3) == 0 {
		return l.transaction(0, first, second) // upwards, lest two transactions deadlock
	}
	return l.transaction(0, first)
}

// transaction writes up to three events of each aggregate and stays open that long.
func (l *Load) transaction(open time.Duration, aggregates ...int) error {
	ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second+open)
	defer cancel()
	tx, err := l.db.BeginTx(ctx, nil)
	if err != nil {
		return err
	}
	defer func() { _ = tx.Rollback() }()
	var ids []ID
	for _, aggregate := range aggregates {
		if _, err := tx.ExecContext(ctx, `UPDATE orders SET version = version + 1 WHERE id = $1`, aggregate); err != nil {
			return err
		}
		for range 1 + rand.IntN(3) {
			var text string
			err := tx.QueryRowContext(ctx,
				`INSERT INTO outbox_events (aggregate_type, aggregate_id, event_type, payload)
				 VALUES ('order', $1, 'order.changed', '{"total": 12.50}') RETURNING id`, aggregate).Scan(&text)
			if err != nil {
				return err
			}
			id, err := ParseID(text)
			if err != nil {
				return err
			}
			ids = append(ids, id)
		}
	}
	time.Sleep(open)
	if rand.IntN(10) == 0 {
		l.rolledBack.Add(int64(len(ids)))
		return tx.Rollback()
	}
	asked := time.Now()
	l.mu.Lock() // before the commit: the delivery may be faster than its answer
	for _, id := range ids {
		l.commits[id] = asked
	}
	l.mu.Unlock()
	return tx.Commit()
}

// Hold stops the writers once their transactions have ended, until Release.
func (l *Load) Hold() { l.running.Lock() }

// Release lets the writers go on.
func (l *Load) Release() { l.running.Unlock() }

// Asked returns when the commit of an event was asked for; false if that was before the last Forget.
func (l *Load) Asked(id ID) (time.Time, bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	at, ok := l.commits[id]
	return at, ok
}

// Forget drops the times of commits.
func (l *Load) Forget() {
	l.mu.Lock()
	defer l.mu.Unlock()
	clear(l.commits)
}

// RolledBack returns how many events were written and rolled back on purpose.
func (l *Load) RolledBack() int64 { return l.rolledBack.Load() }

// Failed returns how many transactions ended in an error, which happens in outages.
func (l *Load) Failed() int64 { return l.failed.Load() }

// Stop ends the writers and waits for them. Safe to call twice, but not while they are held.
func (l *Load) Stop() {
	l.cancel()
	l.writers.Wait()
}

// openDB opens a pool. pq's startup knows no context, so its limit is part of the URL.
func openDB(dsn string) (*sql.DB, error) {
	u, err := url.Parse(dsn)
	if err != nil {
		return nil, fmt.Errorf("database: not a URL")
	}
	q := u.Query()
	q.Set("connect_timeout", "5")
	u.RawQuery = q.Encode()
	return sql.Open("postgres", u.String())
}
