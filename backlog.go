package main

import (
	"cmp"
	"context"
	"database/sql"
	"log/slog"
	"time"

	"github.com/lib/pq"
	"github.com/lib/pq/pqerror"

	sqlfiles "outbox-relay/sql"
)

const (
	// backlogInterval is how often the backlog is counted, and backlogRest how many times as long
	// as counting took it rests at least: counting millions must not become a load.
	backlogInterval = 5 * time.Second
	backlogRest     = 20
)

// Backlog counts pending events and dead letters into gauges, over a connection of its own, so
// that neither a scrape nor the relay's work ever waits for it.
type Backlog struct {
	cfg     Config
	log     *slog.Logger
	metrics *Metrics
}

// NewBacklog makes a Backlog; it connects to nothing.
func NewBacklog(cfg Config, log *slog.Logger, m *Metrics) *Backlog {
	return &Backlog{cfg: cfg, log: log.With(keyServer, PeerPostgres), metrics: m}
}

// Run counts until ctx is done.
func (b *Backlog) Run(ctx context.Context) {
	failures := &repeatLog{log: b.log, what: "count the backlog"}
	for ctx.Err() == nil {
		began := time.Now()
		if err := b.count(ctx); err == nil {
			failures.OK()
		} else if ctx.Err() == nil {
			if pq.As(err, pqerror.UndefinedColumn) != nil {
				err = cmp.Or(notOurs(ctx, b.cfg), err)
			}
			failures.Failed(explained(err))
		}
		sleep(ctx, max(backlogInterval, backlogRest*time.Since(began)))
	}
}

// count makes a connection for one count: an idle one would have to be guarded against all that
// happens to idle connections.
func (b *Backlog) count(ctx context.Context) error {
	db, err := openDatabase(b.cfg)
	if err != nil {
		return err
	}
	defer db.Close()
	ctx, cancel := context.WithTimeout(ctx, answerTimeout)
	defer cancel()
	tx, err := db.BeginTx(ctx, &sql.TxOptions{ReadOnly: true})
	if err != nil {
		return err
	}
	defer func() { _ = tx.Rollback() }()
	if _, err := tx.ExecContext(ctx, sqlfiles.Status("planner")); err != nil {
		return err
	}
	var pending, dead, held int64
	var oldest float64
	if err := tx.QueryRowContext(ctx, sqlfiles.Backlog, b.cfg.OnDeadLetter == onDeadLetterHold).Scan(&pending, &oldest, &dead, &held); err != nil {
		return err
	}
	if b.cfg.Ordering == orderingNone { // nobody waits for anybody
		held = 0
	}
	b.metrics.Pending.Set(float64(pending))
	b.metrics.OldestPendingAge.Set(max(oldest, 0))
	b.metrics.DeadLetters.Set(float64(dead))
	b.metrics.HeldAggregates.Set(float64(held))
	b.metrics.BacklogSampled.SetToCurrentTime()
	return nil
}
