package main

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"outbox-relay/internal/testenv"
	sqlfiles "outbox-relay/sql"
)

// The doorbell rests on the order of few statements: writers take the lock shared and look for
// nothing, the relay takes it exclusively and looks once more. These tests put every kind of writer
// between any two of the relay's statements, on a real server. Nothing but a ring or the look
// before sleep can bring an event: the fallback poll is an hour away, and so is the look
// that follows activity.

// steps runs actions at numbered moments of the relay's work: before and after each statement.
type steps struct {
	mu   sync.Mutex // guards all below
	at   map[int]func()
	now  int
	last time.Time
	seen map[string]int // moments by name
}

func (s *steps) pass(name string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.seen[name]++
	s.last = time.Now()
	s.run(s.now)
	s.now++
}

func (s *steps) run(at int) {
	if f := s.at[at]; f != nil {
		delete(s.at, at)
		f()
	}
}

// arm plans actions, counted from the next moment.
func (s *steps) arm(at map[int]func()) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.at, s.now, s.last = at, 0, time.Now()
}

// finish does what is still planned, in order, once the relay is quiet: it sleeps.
func (s *steps) finish() {
	for {
		s.mu.Lock()
		if len(s.at) == 0 {
			s.mu.Unlock()
			return
		}
		if time.Since(s.last) > 20*time.Millisecond {
			next := -1
			for at := range s.at {
				if next < 0 || at < next {
					next = at
				}
			}
			s.run(next)
		}
		s.mu.Unlock()
		time.Sleep(time.Millisecond)
	}
}

// steppedSession is a real working session that stops at every step.
type steppedSession struct {
	*WorkingSession
	steps  *steps
	commit time.Duration // how much longer a settle takes
}

func (s *steppedSession) TryDoorbell() (bool, error) {
	s.steps.pass("before try")
	got, err := s.WorkingSession.TryDoorbell()
	s.steps.pass(fmt.Sprintf("tried: %v", got))
	return got, err
}

func (s *steppedSession) ReleaseDoorbell() error {
	s.steps.pass("before release")
	defer s.steps.pass("released")
	return s.WorkingSession.ReleaseDoorbell()
}

func (s *steppedSession) Claim(q ClaimQuery) (Claim, error) {
	s.steps.pass("before claim")
	defer s.steps.pass("claimed")
	return s.WorkingSession.Claim(q)
}

func (s *steppedSession) Settle(st Settlement) (Settled, error) {
	s.steps.pass("before settle")
	defer s.steps.pass("settled")
	time.Sleep(s.commit)
	return s.WorkingSession.Settle(st)
}

// sink confirms whatever it is given.
type sink struct {
	news    Bell
	mu      sync.Mutex // guards the rest
	results []Result
	got     map[string]bool
	down    bool
}

func (p *sink) connect(up bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.down = !up
	p.news.Ring()
}

func (p *sink) Publish(events []*Event) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, e := range events {
		p.results = append(p.results, Result{Event: e, Outcome: Confirmed})
		p.got[e.ID] = true
	}
	p.news.Ring()
}
func (p *sink) Recall() {}
func (p *sink) Take() ([]Result, Link) {
	p.mu.Lock()
	defer p.mu.Unlock()
	r := p.results
	p.results = nil
	return r, Link{Up: !p.down}
}

func (p *sink) has(ids []string) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	return !slices.ContainsFunc(ids, func(id string) bool { return !p.got[id] })
}

// stepRig is a relay on a real server whose every statement is a step.
type stepRig struct {
	db    *sql.DB
	steps *steps
	sink  *sink
}

func newStepRig(t *testing.T, commit time.Duration) *stepRig {
	dsn := testenv.Database(t)
	migrated(t, dsn)
	was := lookInterval
	lookInterval = time.Hour
	cfg := testConfig()
	cfg.DatabaseURL, cfg.FallbackInterval, cfg.BatchSize, cfg.AMQPMaxMessageBytes = dsn, time.Hour, 100, 1<<20
	notified, reconnected, news := NewBell(), NewBell(), NewBell()
	log, metrics := slog.New(slog.DiscardHandler), newMetrics(prometheus.NewRegistry())
	listener, store := NewListener(cfg, log, metrics, notified, reconnected), NewStore(cfg)
	r := &stepRig{
		db: testenv.DB(t, dsn), steps: &steps{seen: make(map[string]int)}, sink: &sink{news: news, got: make(map[string]bool)},
	}
	relay := &Relay{
		cfg: cfg, name: "test", ears: listener, publisher: r.sink, health: newHealth(checkPostgres, checkRabbitMQ, checkRelay),
		metrics: metrics, log: log, notified: notified, reconnected: reconnected, news: news,
		connect: func(ctx context.Context) (Session, error) {
			s, err := store.Open(ctx)
			return &steppedSession{s, r.steps, commit}, err
		},
	}
	ctx, stop := context.WithCancel(t.Context())
	var running sync.WaitGroup
	running.Go(func() { listener.Run(ctx) })
	running.Go(func() { _ = relay.Run(ctx) })
	t.Cleanup(func() {
		stop()
		running.Wait()
		lookInterval = was
	})
	r.deliver(t, r.write(t, r.db)) // the listener listens
	return r
}

type execer interface {
	QueryRowContext(ctx context.Context, query string, args ...any) *sql.Row
}

func (r *stepRig) write(t *testing.T, q execer) (id string) {
	t.Helper()
	err := q.QueryRowContext(context.Background(), `INSERT INTO outbox_events (aggregate_type, aggregate_id, event_type, payload)
		VALUES ('order', '1', 'order.created', '{}') RETURNING id`).Scan(&id)
	if err != nil {
		t.Error(err)
	}
	return id
}

func (r *stepRig) deliver(t *testing.T, ids ...string) {
	t.Helper()
	testenv.Eventually(t, 20*time.Second, "the events are published", func() bool { return r.sink.has(ids) })
}

// stepWriter is a transaction whose first half happens at one step and its end at another.
type stepWriter struct {
	name  string
	begin func(t *testing.T, r *stepRig) (end func() (id string))
}

// writerIn runs an insert in a transaction of some kind. wrap comes before the insert, end after.
func writerIn(name string, level sql.IsolationLevel, before, after string, commit bool) stepWriter {
	return stepWriter{name, func(t *testing.T, r *stepRig) func() string {
		tx, err := r.db.BeginTx(context.Background(), &sql.TxOptions{Isolation: level})
		if err != nil {
			t.Error(err)
			return func() string { return "" }
		}
		run := func(query string) {
			if _, err := tx.ExecContext(context.Background(), query); err != nil {
				t.Errorf("%s: %v", query, err)
			}
		}
		run(before)
		id := r.write(t, tx)
		run(after)
		return func() string {
			if !commit {
				_ = tx.Rollback()
				return ""
			}
			if err := tx.Commit(); err != nil {
				t.Error(err)
			}
			return id
		}
	}}
}

var stepWriters = []stepWriter{
	{"one statement", func(t *testing.T, r *stepRig) func() string {
		id := r.write(t, r.db)
		return func() string { return id }
	}},
	writerIn("transaction", sql.LevelDefault, "", "", true),
	writerIn("rolled back", sql.LevelDefault, "", "", false),
	writerIn("savepoint", sql.LevelDefault, "SAVEPOINT a", "RELEASE a", true),
	// The lock that the trigger took within goes with the savepoint; the insert after it takes its own.
	writerIn("after a savepoint rolled back", sql.LevelDefault,
		`SAVEPOINT a; INSERT INTO outbox_events (aggregate_type, aggregate_id, event_type, payload) VALUES ('order', '1', 'undone', '{}'); ROLLBACK TO a`, "", true),
	writerIn("repeatable read", sql.LevelRepeatableRead, "SELECT count(*) FROM outbox_events", "", true),
	writerIn("serializable", sql.LevelSerializable, "SELECT count(*) FROM outbox_events", "", true),
	{"copy", func(t *testing.T, r *stepRig) func() string {
		ctx, id := context.Background(), testUUID(t, r.db)
		tx, err := r.db.BeginTx(ctx, nil)
		if err != nil {
			t.Fatal(err)
		}
		rows, err := tx.PrepareContext(ctx, "COPY outbox_events (id, aggregate_type, aggregate_id, event_type, payload) FROM STDIN")
		if err != nil {
			t.Fatal(err)
		}
		_, err = rows.ExecContext(ctx, id, "order", "1", "order.created", "{}")
		_, flushed := rows.ExecContext(ctx)
		if err := errors.Join(err, flushed, rows.Close()); err != nil {
			t.Error(err)
		}
		return func() string {
			if err := tx.Commit(); err != nil {
				t.Error(err)
			}
			return id
		}
	}},
	// A transaction to be prepared is silent by request. Whatever rings next brings its event.
	{"prepared", func(t *testing.T, r *stepRig) func() string {
		id := testUUID(t, r.db)
		exec := func(query string) {
			if _, err := r.db.ExecContext(context.Background(), strings.ReplaceAll(query, "ID", id)); err != nil {
				t.Error(err)
			}
		}
		exec(`BEGIN; SET LOCAL outbox.notify = 'off';
			INSERT INTO outbox_events (id, aggregate_type, aggregate_id, event_type, payload) VALUES ('ID', 'order', '1', 'order.created', '{}');
			PREPARE TRANSACTION 'ID'`)
		return func() string {
			exec("COMMIT PREPARED 'ID'")
			r.write(t, r.db)
			return id
		}
	}},
}

func testUUID(t *testing.T, db *sql.DB) (id string) {
	t.Helper()
	if err := db.QueryRowContext(context.Background(), "SELECT gen_random_uuid()").Scan(&id); err != nil {
		t.Fatal(err)
	}
	return id
}

// While the link to the broker is down the doorbell is given up. When it is back the relay looks,
// takes the lock, looks once more and sleeps: every writer begins and ends at each of these steps.
func TestDoorbellMissesNoWriterAtAnyStepOfFallingAsleep(t *testing.T) {
	const most = 12 // moments from the first look to the sleep
	r := newStepRig(t, 0)
	for _, w := range stepWriters {
		for first := range most {
			for last := first; last < most; last++ {
				r.sink.connect(false)
				testenv.Eventually(t, 20*time.Second, "the doorbell is given up", func() bool { return !r.asleep(t) })
				silent := r.write(t, r.db)
				r.round(t, w, first, last, func() { r.sink.connect(true) }, silent)
			}
		}
	}
	r.visited(t, "released", "tried: true", "tried: false")
}

// Commits that take long make the relay stay awake after few events, and sleep when none come.
func TestDoorbellMissesNoWriterWhileAwakeByChoice(t *testing.T) {
	r := newStepRig(t, 20*time.Millisecond)
	for i := range 64 {
		first := 37 * i % 300 // the polls, one a millisecond, of two windows of rateWindow, and the sleep
		r.round(t, stepWriters[i%len(stepWriters)], first, first+11*i%30, func() {}, r.write(t, r.db), r.write(t, r.db), r.write(t, r.db))
	}
	r.visited(t, "released", "tried: true", "tried: false")
}

// asleep reports whether somebody holds the doorbell lock exclusively: the relay.
func (r *stepRig) asleep(t *testing.T) bool {
	t.Helper()
	var n int
	err := r.db.QueryRowContext(t.Context(), `SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND mode = 'ExclusiveLock'
		AND database = (SELECT oid FROM pg_database WHERE datname = current_database()) AND classid::bigint = $1`,
		int64(sqlfiles.DoorbellLockClass)).Scan(&n)
	if err != nil {
		t.Fatal(err)
	}
	return n > 0
}

// round has w begin and end at two moments, counted from start on. Its event and the others must
// be published.
func (r *stepRig) round(t *testing.T, w stepWriter, first, last int, start func(), others ...string) {
	t.Helper()
	var id string
	end := func() string { return "" }
	at := map[int]func(){first: func() { end = w.begin(t, r) }, last: func() { id = end() }}
	if last == first {
		at[first] = func() { id = w.begin(t, r)() }
	}
	r.steps.arm(at)
	start()
	r.steps.finish()
	if id != "" {
		others = append(others, id)
	}
	r.deliver(t, others...)
	if t.Failed() {
		t.Fatalf("%s, from step %d to %d", w.name, first, last)
	}
}

func (r *stepRig) visited(t *testing.T, moments ...string) {
	t.Helper()
	r.steps.mu.Lock()
	defer r.steps.mu.Unlock()
	for _, m := range moments {
		if r.steps.seen[m] == 0 {
			t.Errorf("never at %q: %v", m, r.steps.seen)
		}
	}
	t.Log(r.steps.seen)
}
