package main

import (
	"context"
	"fmt"
	"log/slog"
	"time"

	sqlfiles "outbox-relay/sql"
)

// Values of RETENTION that are no durations, and the bounds of those that are.
const (
	retentionOff       = "off"
	retentionImmediate = "immediate" // settle deletes instead of marking

	minRetention = time.Second
	maxRetention = 87600 * time.Hour
)

const (
	// A pass over the table starts every twentieth of RETENTION, so that the table holds little
	// more than it should, but not more often than every minute: a pass reads all of it.
	retentionParts     = 20
	retentionMinPeriod = time.Minute
	// retentionRetry is the wait after a failure. The next pass goes on where it was.
	retentionRetry = 10 * time.Second
	// retentionPassTime bounds a pass, and with it how long its connection and its lock are held.
	// What is left is for the next one, which follows at once.
	retentionPassTime = 10 * time.Minute

	// retentionTarget is what a statement should take, and retentionRest how many times as long as
	// it took the server rests from us: at most a fifth of one processor. Tried on two busy
	// ones: 10,000 rows a second, and nothing to be seen in the latency of writers.
	retentionTarget  = 5 * time.Millisecond
	retentionRest    = 4
	retentionMaxRest = 5 * time.Second // well below idle_session_timeout
	// Bounds of a statement: blocks to read, and rows to delete. Blocks full of old rows take
	// longer than those with none, so both are bounded, and the first grow and shrink as needed.
	retentionMaxBlocks    = 1024
	retentionMaxRows      = 1000
	retentionRowsPerBlock = 16
)

// keep returns how long processed events stay in the table; 0 when no pass deletes them, because
// they stay for good or never are marked.
func (c Config) keep() (time.Duration, error) {
	if c.Retention == retentionOff || c.Retention == retentionImmediate {
		return 0, nil
	}
	d, err := time.ParseDuration(c.Retention)
	switch {
	case err != nil:
		return 0, fmt.Errorf("%q is not off, immediate or a duration like 168h", c.Retention)
	case d == 0:
		return 0, fmt.Errorf("%q could mean two things: set immediate to delete events instead of marking them processed, off to keep them", c.Retention)
	case d < minRetention || d > maxRetention:
		return 0, fmt.Errorf("%q is not from 1s to 87600h", c.Retention)
	}
	return d, nil
}

// Retention deletes processed events that are older than RETENTION, over a connection of its own
// and beside the load: in statements of a few milliseconds that wait for no lock, with pauses
// between them. One goroutine, in Run, owns it.
type Retention struct {
	cfg     Config
	keep    time.Duration // 0: nothing to do
	working func() bool
	log     *slog.Logger
	metrics *Metrics

	next   int64 // block to go on with
	blocks int64 // to look at in one statement
}

// NewRetention makes a Retention; it connects to nothing. It deletes while working says that this relay works the outbox:
// one that stands by, or was not let in yet, keeps away from the table.
func NewRetention(cfg Config, log *slog.Logger, m *Metrics, working func() bool) (*Retention, error) {
	keep, err := cfg.keep()
	if err != nil {
		return nil, err
	}
	return &Retention{cfg: cfg, keep: keep, working: working, log: log.With(keyServer, PeerPostgres), metrics: m, blocks: 1}, nil
}

// Run deletes until ctx is done. It returns at once when RETENTION is off or immediate.
func (r *Retention) Run(ctx context.Context) {
	if r.keep == 0 {
		return
	}
	failures := &repeatLog{log: r.log, what: "delete old events"}
	period := max(retentionMinPeriod, r.keep/retentionParts)
	began := time.Now()
	for ctx.Err() == nil {
		if !r.working() {
			sleep(ctx, beatInterval)
			continue
		}
		finished, err := r.pass(ctx)
		switch {
		case ctx.Err() != nil:
		case err != nil:
			failures.Failed(explained(err))
			sleep(ctx, retentionRetry)
		case finished:
			failures.OK()
			sleep(ctx, period-time.Since(began))
			began = time.Now()
		}
	}
}

// pass walks the table from where the last one stopped. It reports whether it came to the end,
// or left the table to another relay that is at it.
func (r *Retention) pass(ctx context.Context) (finished bool, err error) {
	began := time.Now()
	db, err := openDatabase(r.cfg)
	if err != nil {
		return false, err
	}
	defer func() { _ = db.Close() }()
	conn, err := db.Conn(ctx)
	if err != nil {
		return false, err
	}
	defer func() { _ = conn.Close() }() // into a pool that is closed next, which ends the session and the lock
	if _, err := conn.ExecContext(ctx, sqlfiles.Session("setup")); err != nil {
		return false, err
	}
	var table, end int64
	if err := conn.QueryRowContext(ctx, sqlfiles.Retention("table")).Scan(&table, &end); err != nil {
		return false, fmt.Errorf("find outbox_events: %w", err)
	}
	var got bool
	if err := conn.QueryRowContext(ctx, sqlfiles.RetentionTry(uint32(table))).Scan(&got); err != nil {
		return false, fmt.Errorf("try the retention lock: %w", err)
	}
	if !got {
		r.next = 0
		return true, nil
	}

	var deleted int64
	for r.next < end && time.Since(began) < retentionPassTime && r.working() && ctx.Err() == nil {
		rows := min(retentionRowsPerBlock*r.blocks, retentionMaxRows)
		from, to := fmt.Sprintf("(%d,0)", r.next), fmt.Sprintf("(%d,0)", r.next+r.blocks)
		var n, last int64
		sent := time.Now()
		// Not prepared: a table may be swapped by rename, and this finds it by its name each time.
		err := conn.QueryRowContext(ctx, sqlfiles.Retention("delete"), from, to, r.keep.Milliseconds(), rows).Scan(&n, &last)
		if err != nil {
			r.blocks = 1 // should it have been too much at once
			return false, fmt.Errorf("delete: %w", err)
		}
		took := time.Since(sent)
		r.metrics.RetentionDeleted.Add(float64(n))
		deleted += n
		r.advance(n, rows, last, took)
		sleep(ctx, min(retentionRest*took, retentionMaxRest))
	}
	r.log.Debug("deleted old events", keyCount, deleted, keyDuration, time.Since(began).Round(time.Millisecond))
	if r.next < end {
		return false, nil
	}
	r.next = 0
	return true, nil
}

// advance chooses the blocks of the next statement after one that deleted n of at most limit rows,
// the last in block last.
func (r *Retention) advance(n, limit, last int64, took time.Duration) {
	if n == limit { // there may be more in that block and those after it
		r.next = last
	} else {
		r.next += r.blocks
	}
	switch {
	case took > 2*retentionTarget:
		r.blocks = max(r.blocks/2, 1)
	case took < retentionTarget/2:
		r.blocks = min(r.blocks*2, retentionMaxBlocks)
	}
}
