package main

import (
	"context"
	"database/sql"
	"log/slog"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/testutil"

	"outbox-relay/internal/testenv"
	sqlfiles "outbox-relay/sql"
)

// newTestRetention deletes what was processed over an hour ago.
func newTestRetention(t *testing.T, dsn string) *Retention {
	t.Helper()
	cfg := validConfig(t)
	cfg.DatabaseURL, cfg.Retention = dsn, "1h"
	r, err := NewRetention(cfg, slog.New(slog.DiscardHandler), newMetrics(prometheus.NewRegistry()), func() bool { return true })
	if err != nil {
		t.Fatal(err)
	}
	return r
}

// wholePass makes one pass, which must come to its end.
func wholePass(t *testing.T, r *Retention) {
	t.Helper()
	if finished, err := r.pass(t.Context()); err != nil || !finished {
		t.Fatalf("pass: finished %v, %v", finished, err)
	}
}

// insertKind inserts n events of a kind, which is their type, with what else the columns hold.
func insertKind(t *testing.T, db *sql.DB, n int, kind, columns, values string) {
	t.Helper()
	testenv.MustExec(t, db, "INSERT INTO outbox_events (aggregate_type, aggregate_id, event_type, payload"+columns+
		") SELECT 'order', i::text, $1, '{}'"+values+" FROM generate_series(1, $2::int) i", kind, n)
}

// countKinds counts the events in the table by their type.
func countKinds(t *testing.T, db *sql.DB) map[string]int {
	t.Helper()
	rows, err := db.Query("SELECT event_type, count(*) FROM outbox_events GROUP BY 1")
	if err != nil {
		t.Fatal(err)
	}
	defer rows.Close()
	kinds := make(map[string]int)
	for rows.Next() {
		var kind string
		var n int
		if err := rows.Scan(&kind, &n); err != nil {
			t.Fatal(err)
		}
		kinds[kind] = n
	}
	if err := rows.Err(); err != nil {
		t.Fatal(err)
	}
	return kinds
}

func TestRetentionDeletesOnlyWhatIsProcessedAndOld(t *testing.T) {
	t.Parallel()
	dsn, db := testenv.OpenDatabase(t)
	testenv.MustExec(t, db, sqlfiles.Schema)
	const old, young = "now() - interval '61 minutes'", "now() - interval '59 minutes'"
	for range 2 { // the kinds mixed over the table
		insertKind(t, db, 100, "fresh", ", created_at", ", "+old)
		insertKind(t, db, 100, "failed", ", created_at, attempts, retry_after", ", "+old+", 1, "+old)
		insertKind(t, db, 100, "dead", ", created_at, attempts, dead_at", ", "+old+", 9, "+old)
		insertKind(t, db, 3000, "old", ", processed_at", ", "+old)
		insertKind(t, db, 100, "old, discarded", ", dead_at, processed_at", ", "+old+", "+old)
		insertKind(t, db, 100, "young", ", created_at, processed_at", ", "+old+", "+young)
	}
	locked := testenv.Begin(t, db, "UPDATE outbox_events SET event_type = 'locked' WHERE event_type = 'old' AND aggregate_id = '7'")

	r := newTestRetention(t, dsn)
	wholePass(t, r)
	want := map[string]int{"fresh": 200, "failed": 200, "dead": 200, "young": 200, "old": 2}
	if diff := cmp.Diff(want, countKinds(t, db)); diff != "" {
		t.Errorf("with two rows locked (-want +got):\n%s", diff)
	}
	if err := locked.Commit(); err != nil {
		t.Fatal(err)
	}
	wholePass(t, r)
	delete(want, "old")
	if diff := cmp.Diff(want, countKinds(t, db)); diff != "" {
		t.Errorf("with nothing locked any more (-want +got):\n%s", diff)
	}
	if got, want := testutil.ToFloat64(r.metrics.RetentionDeleted), 6200.0; got != want {
		t.Errorf("outbox_retention_deleted_total = %v, want %v", got, want)
	}
}

func TestRetentionReadsOnlyItsBlocks(t *testing.T) {
	t.Parallel()
	_, db := testenv.OpenDatabase(t)
	testenv.MustExec(t, db, sqlfiles.Schema)
	testenv.MustExec(t, db, "ANALYZE outbox_events") // statistics of an empty table
	insertKind(t, db, 20_000, "old", ", processed_at", ", now() - interval '2 hours'")
	tx := testenv.Begin(t, db, sqlfiles.Session("setup"))
	testenv.MustExec(t, tx, "PREPARE retention AS "+sqlfiles.Retention("delete"))
	plan := explain(t, tx, "EXECUTE retention ('(8,0)', '(16,0)', 3600000, 1000)")
	if !strings.Contains(plan, "Tid Range Scan on outbox_events") || strings.Contains(plan, "Seq Scan") || strings.Contains(plan, "Index") {
		t.Errorf("not a Tid Range Scan:\n%s", plan)
	}
}

func TestRetentionByTwoAtOnce(t *testing.T) {
	t.Parallel()
	dsn, db := testenv.OpenDatabase(t)
	testenv.MustExec(t, db, sqlfiles.Schema)
	insertKind(t, db, 5000, "old", ", processed_at", ", now() - interval '2 hours'")

	// The statement itself waits for nobody.
	const some = "SELECT FROM outbox_events LIMIT 1"
	first, second := testenv.Begin(t, db, some), testenv.Begin(t, db, some)
	remove := func(tx *sql.Tx) (n, last int) {
		if err := tx.QueryRow(sqlfiles.Retention("delete"), "(0,0)", "(1000,0)", 1000, 3000).Scan(&n, &last); err != nil {
			t.Fatal(err)
		}
		return n, last
	}
	if n, last := remove(first); n != 3000 || last == 0 {
		t.Errorf("the first deletes %d, up to block %d; want 3000", n, last)
	}
	if n, _ := remove(second); n != 2000 {
		t.Errorf("the second deletes %d meanwhile, want the other 2000", n)
	}
	testenv.MustExec(t, first, "ROLLBACK")
	testenv.MustExec(t, second, "ROLLBACK")

	// One that does not get the lock leaves the work to the other.
	holder := testenv.Begin(t, db, sqlfiles.RetentionTry(tableOID(t, db)))
	r := newTestRetention(t, dsn)
	wholePass(t, r)
	if got := countKinds(t, db)["old"]; got != 5000 {
		t.Errorf("%d of 5000 events are left by one without the lock", got)
	}
	testenv.MustExec(t, holder, "SELECT pg_advisory_unlock_all()")

	other := newTestRetention(t, dsn)
	var wg sync.WaitGroup
	for _, r := range []*Retention{r, other} {
		wg.Go(func() {
			if _, err := r.pass(t.Context()); err != nil {
				t.Error(err)
			}
		})
	}
	wg.Wait()
	if got := testutil.ToFloat64(r.metrics.RetentionDeleted) + testutil.ToFloat64(other.metrics.RetentionDeleted); got != 5000 {
		t.Errorf("the two deleted %v events, want 5000", got)
	}
}

func TestRetentionGoesOnWhereItWasCutOff(t *testing.T) {
	t.Parallel()
	dsn, db := testenv.OpenDatabase(t)
	testenv.MustExec(t, db, sqlfiles.Schema)
	insertKind(t, db, 20_000, "old", ", processed_at", ", now() - interval '2 hours'")
	proxy := testenv.NewProxy(t, dsn)
	r := newTestRetention(t, proxy.URL)

	done := make(chan error, 1)
	go func() {
		_, err := r.pass(context.WithoutCancel(t.Context()))
		done <- err
	}()
	testenv.Until(t, func() bool { return testutil.ToFloat64(r.metrics.RetentionDeleted) > 1000 })
	proxy.Refuse()
	if err := <-done; err == nil {
		t.Fatal("a pass that was cut off reports no error")
	}
	if r.next == 0 {
		t.Error("the next pass begins at block 0")
	}
	if _, err := r.pass(t.Context()); err == nil {
		t.Error("a pass without a server reports no error")
	}
	proxy.Resume()
	wholePass(t, r)
	if got := countKinds(t, db)["old"]; got != 0 {
		t.Errorf("%d events are left", got)
	}
}

func TestRetentionFitsItsStatementsToTheServer(t *testing.T) {
	for _, tt := range []struct {
		name                 string
		blocks, n            int64
		took                 time.Duration
		wantNext, wantBlocks int64
	}{
		{"quick, it looks at more", 8, 0, time.Millisecond, 108, 16},
		{"as long as it should, it stays", 8, 3, retentionTarget, 108, 8},
		{"slow, it looks at less", 8, 3, time.Second, 108, 4},
		{"never at less than a block", 1, 0, time.Second, 101, 1},
		{"never at more than the limit", retentionMaxBlocks, 0, 0, 100 + retentionMaxBlocks, retentionMaxBlocks},
		{"full, it goes on in the block it came to", 8, 128, retentionTarget, 103, 8},
	} {
		t.Run(tt.name, func(t *testing.T) {
			r := &Retention{next: 100, blocks: tt.blocks}
			r.advance(tt.n, 128, 103, tt.took)
			if r.next != tt.wantNext || r.blocks != tt.wantBlocks {
				t.Errorf("goes on at block %d with %d blocks, want %d with %d", r.next, r.blocks, tt.wantNext, tt.wantBlocks)
			}
		})
	}
}

// startRelay runs a relay until the test calls the function it returns, or ends.
func startRelay(t *testing.T, change func(*Config)) (stop func()) {
	t.Helper()
	cfg := validConfig(t)
	change(&cfg)
	if err := cfg.validate(&runCommand{}, nil, noEnv); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan struct{})
	go func() {
		defer close(done)
		health := newHealth(checkPostgres, checkRabbitMQ, checkRelay)
		if err := runRelay(ctx, cfg, slog.New(slog.DiscardHandler), newMetrics(prometheus.NewRegistry()), health); err != nil {
			t.Error(err)
		}
	}()
	stop = func() {
		cancel()
		<-done
	}
	t.Cleanup(stop)
	return stop
}

func TestRetentionImmediateLeavesAnEmptyTable(t *testing.T) {
	for _, ordering := range []string{orderingAggregate, orderingNone} {
		t.Run(ordering, func(t *testing.T) {
			t.Parallel()
			dsn, db := testenv.OpenDatabase(t)
			testenv.MustExec(t, db, sqlfiles.Schema)
			amqpURL := testenv.Vhost(t)
			q := testenv.Consume(t, amqpURL, "outbox")
			const events = 3000
			insertKind(t, db, events, "order.created", "", "")
			// One cannot be deleted at once: settling in order passes it over, and does not send it again.
			locked := testenv.Begin(t, db, "SELECT FROM outbox_events WHERE aggregate_id = '1000' FOR UPDATE")

			stop := startRelay(t, func(c *Config) {
				c.DatabaseURL, c.AMQPURL, c.Ordering, c.Retention = dsn, amqpURL, ordering, retentionImmediate
			})
			testenv.Until(t, func() bool { return testenv.QueryInt(t, db, "SELECT count(*) FROM outbox_events") == 1 })
			if err := locked.Rollback(); err != nil {
				t.Fatal(err)
			}
			testenv.Until(t, func() bool { return testenv.QueryInt(t, db, "SELECT count(*) FROM outbox_events") == 0 })
			q.Collect(t, events, 20*time.Second)
			stop()
			seen := make(map[string]bool)
			for _, d := range q.Received() {
				if seen[d.MessageId] {
					t.Errorf("event %s came twice", d.MessageId)
				}
				seen[d.MessageId] = true
			}
			if len(seen) != events {
				t.Errorf("%d events came, want %d", len(seen), events)
			}
		})
	}
}

func TestRetentionBesideTheRelay(t *testing.T) {
	t.Parallel()
	dsn, db := testenv.OpenDatabase(t)
	testenv.MustExec(t, db, sqlfiles.Schema)
	amqpURL := testenv.Vhost(t)
	q := testenv.Consume(t, amqpURL, "outbox")
	insertKind(t, db, 1000, "old", ", processed_at", ", now() - interval '2 hours'")
	insertKind(t, db, 10, "new", ", created_at", ", now() - interval '2 hours'")
	startRelay(t, func(c *Config) { c.DatabaseURL, c.AMQPURL, c.Retention = dsn, amqpURL, "1h" })
	q.Collect(t, 10, 20*time.Second)
	testenv.Until(t, func() bool { return countKinds(t, db)["old"] == 0 })
	testenv.Until(t, func() bool {
		return testenv.QueryInt(t, db, "SELECT count(*) FROM outbox_events WHERE processed_at IS NULL") == 0
	})
	if got := countKinds(t, db)["new"]; got != 10 {
		t.Errorf("of 10 new events %d are left, want all: they were processed just now", got)
	}
}

// A relay that stands by, or was refused, does not touch the table.
func TestRetentionWaitsForTheRelayToWork(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var log syncBuffer
		cfg := validConfig(t)
		cfg.DatabaseURL, cfg.Retention = "postgres://nobody@127.0.0.1:1/none?sslmode=disable", "1h"
		r, err := NewRetention(cfg, slog.New(slog.NewTextHandler(&log, nil)), newMetrics(prometheus.NewRegistry()), func() bool { return false })
		if err != nil {
			t.Fatal(err)
		}
		ctx, stop := context.WithCancel(t.Context())
		ended := make(chan struct{})
		go func() {
			defer close(ended)
			r.Run(ctx)
		}()
		time.Sleep(time.Hour)
		stop()
		<-ended
		if log.String() != "" {
			t.Errorf("it tried:\n%s", log.String())
		}
	})
}
