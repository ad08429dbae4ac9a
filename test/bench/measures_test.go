package bench

import (
	"context"
	"database/sql"
	"fmt"
	"math/rand/v2"
	"net/url"
	"regexp"
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

// delay measures the time from commit to consumer at so many events a second. The first second does not
// count.
func delay(rate int, start publisher) measure {
	return func(t *testing.T) figures {
		o := newOutbox(t)
		events := rate * (1 + *seconds) / *perTx * *perTx
		c := consume(t, o, events, *aggregates)
		start(t, o)
		committed := load(t, o, rate, events)
		c.await(t, nil)
		if t.Failed() {
			return nil
		}
		var delays []float64
		for n := rate; n < events; n++ {
			delays = append(delays, float64(c.at[n].Load()-committed[n])/1e6)
		}
		slices.Sort(delays)
		return figures{
			"p50_ms": percentile(delays, 50), "p90_ms": percentile(delays, 90),
			"p99_ms": percentile(delays, 99), "max_ms": percentile(delays, 100),
		}
	}
}

// load writes events at random times, so many a second on average, which do not depend on how long
// earlier ones took: an open loop. It returns when the commit of each had returned, after epoch.
func load(t *testing.T, o outbox, rate, events int) (committed []int64) {
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
	committed = make([]int64, events)
	due := make(chan int, events) // the first event of a transaction; room for all, or the loop would be closed
	g, ctx := errgroup.WithContext(t.Context())
	for range *writers {
		g.Go(func() error {
			for first := range due {
				if err := transaction(ctx, db, statement, first, pad); err != nil {
					return err
				}
				at := int64(now())
				for n := range *perTx {
					committed[first+n] = at
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
	return committed
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

// backlog measures how long so many events take that appear at once, from their commit to the last
// delivery, and what the relay needs for it.
func backlog(events int, start publisher) measure {
	return func(t *testing.T) figures {
		o := newOutbox(t)
		c := consume(t, o, events, *aggregates)
		relay := start(t, o)
		db := testenv.DB(t, o.dsn)
		tx, err := db.BeginTx(t.Context(), nil)
		if err != nil {
			t.Fatal(err)
		}
		defer func() { _ = tx.Rollback() }()
		_, err = tx.ExecContext(t.Context(), `INSERT INTO outbox_events (aggregate_type, aggregate_id, event_type, payload)
			SELECT '`+aggregateType+`', n % $2::int, '`+eventType+`', jsonb_build_object('n', n, 'pad', $3::text)
			FROM generate_series(0, $1::int - 1) n ORDER BY n`, events, *aggregates, padding(*payload))
		if err != nil {
			t.Fatal(err)
		}
		var cpu, rss float64
		var looked time.Duration
		look := func() {
			if relay != nil && now()-looked > time.Second/2 {
				looked = now()
				rss = max(rss, relay.Metric(t, "process_resident_memory_bytes"))
			}
		}
		if relay != nil {
			cpu = relay.Metric(t, "process_cpu_seconds_total")
		}
		begun := now()
		if err := tx.Commit(); err != nil {
			t.Fatal(err)
		}
		c.await(t, look)
		if n := c.disordered.Load(); n > 0 {
			t.Errorf("%d events came out of order", n)
		}
		o.settled(t)
		f := figures{"rate": float64(events) / (time.Duration(c.last.Load()) - begun).Seconds()}
		if relay != nil {
			f["cpu_us"] = (relay.Metric(t, "process_cpu_seconds_total") - cpu) / float64(events) * 1e6
			f["rss_mb"] = rss / 1e6
		}
		return f
	}
}

// write measures how many transactions of one insert 32 writers commit a second. prepare is run before,
// to change the trigger; start may be nil.
func (s *servers) write(prepare string, start publisher) measure {
	const sessions = 32
	return func(t *testing.T) figures {
		o := newOutbox(t)
		if prepare != "" {
			testenv.Exec(t, o.dsn, prepare)
		}
		c := consume(t, o, 0, 1)
		if start != nil {
			start(t, o)
		}
		run := writersHere
		if s.postgres != nil {
			run = s.pgbench
		}
		rate := run(t, o, sessions)
		if start != nil {
			inserted := testenv.Value[int64](t, o.dsn, `SELECT count(*) FROM outbox_events`)
			c.awaitUntil(t, nil, func() bool { return c.received.Load() >= inserted })
			o.settled(t)
			if got := c.received.Load(); got != inserted {
				t.Errorf("%d messages for %d events", got, inserted)
			}
		}
		return figures{"rate": rate}
	}
}

var tps = regexp.MustCompile(`tps = ([0-9.]+) \(without initial`)

// pgbench writes from inside the server's container: a writer of its own in Go would take more of the
// processors from the server.
func (s *servers) pgbench(t *testing.T, o outbox, sessions int) float64 {
	t.Helper()
	u, err := url.Parse(o.dsn)
	if err != nil {
		t.Fatal(err)
	}
	script := fmt.Sprintf("\\set a random(1, %d)\nINSERT INTO outbox_events (aggregate_type, aggregate_id, event_type, payload) VALUES ('%s', :a, '%s', '%s');",
		*aggregates, aggregateType, eventType, body(0, padding(*payload)))
	output := s.postgres.Exec(t, "sh", "-c", `printf %s "$0" | exec pgbench -n -U postgres -M prepared -c "$1" -j 2 -T "$2" -f - "$3"`,
		script, strconv.Itoa(sessions), strconv.Itoa(*seconds), u.Path[1:])
	found := tps.FindStringSubmatch(output)
	if found == nil {
		t.Fatalf("pgbench: no rate in its output:\n%s", output)
	}
	rate, err := strconv.ParseFloat(found[1], 64)
	if err != nil {
		t.Fatal(err)
	}
	return rate
}

// writersHere writes from this process, to a server that is not ours.
func writersHere(t *testing.T, o outbox, sessions int) float64 {
	t.Helper()
	db := testenv.DB(t, o.dsn)
	db.SetMaxIdleConns(sessions)
	statement, err := db.PrepareContext(t.Context(), insert)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = statement.Close() }()
	text := body(0, padding(*payload))
	counts := make([]int, sessions)
	begun := now()
	end := begun + time.Duration(*seconds)*time.Second
	g, ctx := errgroup.WithContext(t.Context())
	for i := range sessions {
		g.Go(func() error {
			for now() < end {
				if _, err := statement.ExecContext(ctx, strconv.Itoa(rand.IntN(*aggregates)), text); err != nil {
					return err
				}
				counts[i]++
			}
			return nil
		})
	}
	if err := g.Wait(); err != nil {
		t.Fatal(err)
	}
	sum := 0
	for _, n := range counts {
		sum += n
	}
	return float64(sum) / (now() - begun).Seconds()
}
