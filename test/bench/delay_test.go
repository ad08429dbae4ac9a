package bench

import (
	"context"
	"database/sql"
	"math/rand/v2"
	"slices"
	"strconv"
	"testing"
	"time"

	"golang.org/x/sync/errgroup"

	"outbox-relay/internal/testenv"
)

const (
	aggregateType = "order"
	eventType     = "order.changed"
	insert        = `INSERT INTO outbox_events (aggregate_type, aggregate_id, event_type, payload) VALUES ('` +
		aggregateType + `', $1, '` + eventType + `', $2)`
)

// delay measures the time from commit to consumer at so many events a second, and what a transaction
// takes its writer. The first second does not count.
func delay(rate int, start publisher) measure {
	return func(t *testing.T) figures {
		o := newOutbox(t)
		events := rate * (1 + *seconds) / *perTx * *perTx
		c := consume(t, o, batch{events: events, aggregates: *aggregates})
		start(t, o)
		written := load(t, o, rate, events)
		c.await(t, nil)
		if t.Failed() {
			return nil
		}
		var delays, writes []float64 // in milliseconds
		for n := rate; n < events; n++ {
			delays = append(delays, float64(c.at[n].Load()-written[n].at)/1e6)
			writes = append(writes, float64(written[n].at-written[n].begun)/1e6)
		}
		slices.Sort(delays)
		slices.Sort(writes)
		return figures{
			"p50_ms": percentile(delays, 50), "p90_ms": percentile(delays, 90),
			"p99_ms": percentile(delays, 99), "max_ms": percentile(delays, 100),
			"write_p50_ms": percentile(writes, 50), "write_p99_ms": percentile(writes, 99),
		}
	}
}

// commit is when an event's transaction began and when its commit had returned: nanoseconds after epoch.
type commit struct{ begun, at int64 }

// load writes events at random times, so many a second on average, which do not depend on how long
// earlier ones took: an open loop.
func load(t *testing.T, o outbox, rate, events int) []commit {
	t.Helper()
	db := testenv.DB(t, o.dsn)
	db.SetMaxOpenConns(*writers)
	db.SetMaxIdleConns(*writers)
	statement, err := db.PrepareContext(t.Context(), insert)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = statement.Close() }()
	pad := padding(*payload)
	written := make([]commit, events)
	due := make(chan int, events) // the first event of a transaction; room for all, or the loop would be closed
	g, ctx := errgroup.WithContext(t.Context())
	for range *writers {
		g.Go(func() error {
			for first := range due {
				begun := int64(now())
				if err := transaction(ctx, db, statement, first, pad); err != nil {
					return err
				}
				c := commit{begun, int64(now())}
				for n := range *perTx {
					written[first+n] = c
				}
			}
			return nil
		})
	}
	at := now()
	for first := 0; first < events; first += *perTx {
		at += time.Duration(rand.ExpFloat64() * float64(time.Second) * float64(*perTx) / float64(rate))
		time.Sleep(at - now())
		due <- first
	}
	close(due)
	if err := g.Wait(); err != nil {
		t.Fatal(err)
	}
	return written
}

func transaction(ctx context.Context, db *sql.DB, statement *sql.Stmt, first int, pad string) error {
	event := func(s *sql.Stmt, n int) error {
		_, err := s.ExecContext(ctx, strconv.Itoa(n%*aggregates), body(n, pad))
		return err
	}
	if *perTx == 1 {
		return event(statement, first)
	}
	tx, err := db.BeginTx(ctx, nil)
	if err != nil {
		return err
	}
	defer func() { _ = tx.Rollback() }()
	s := tx.StmtContext(ctx, statement)
	for n := range *perTx {
		if err := event(s, first+n); err != nil {
			return err
		}
	}
	return tx.Commit()
}
