package bench

import (
	"fmt"
	"math/rand/v2"
	"net/url"
	"regexp"
	"strconv"
	"testing"
	"time"

	"golang.org/x/sync/errgroup"

	"outbox-relay/internal/testenv"
)

// sessions is how many commit at once where the writers' rate is measured.
const sessions = 32

// write measures how many transactions of one insert the writers commit a second. prepare is run before,
// to change the trigger; start may be nil.
func (s *servers) write(prepare string, start publisher) measure {
	return func(t *testing.T) figures {
		o := newOutbox(t)
		if prepare != "" {
			testenv.Exec(t, o.dsn, prepare)
		}
		c := consume(t, o, batch{})
		if start != nil {
			start(t, o)
		}
		run := writersHere
		if s.postgres != nil {
			run = s.pgbench
		}
		rate := run(t, o)
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
func (s *servers) pgbench(t *testing.T, o outbox) float64 {
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
func writersHere(t *testing.T, o outbox) float64 {
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
