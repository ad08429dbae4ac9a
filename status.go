package main

import (
	"context"
	"database/sql"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"time"

	sqlfiles "outbox-relay/sql"
)

const (
	// countLimit is where counts of the backlog stop, so that looking stays cheap. Tried: 2 s for a
	// million rows that were just inserted.
	countLimit = 100_000
	// heldLook is how many failed and how many waiting events are looked at for the aggregates that
	// are held back, and heldShown how many of these aggregates are shown.
	heldLook  = 10_000
	heldShown = 5
	// Rates come from the statistics of the table, to which each session reports once a second:
	// rateSample is long enough to see two reports, and rateStep how exactly their times are seen.
	rateSample = 2500 * time.Millisecond
	rateStep   = 100 * time.Millisecond
	// minWatch is the least pause between two looks.
	minWatch = time.Second
)

// statusCommand shows how the outbox is.
type statusCommand struct {
	JSON     bool           `name:"json" help:"Print a JSON object instead of a table; with --watch one a line."`
	Watch    bool           `name:"watch" help:"Keep looking until interrupted."`
	Interval *time.Duration `name:"interval" placeholder:"5s" help:"Pause between looks with --watch, 1s at least; 5s by default."`
}

func (statusCommand) uses(setting string) bool {
	return ofDatabase(setting) || setting == "ON_DEAD_LETTER" || setting == "RETENTION"
}

func (c statusCommand) faults() []fault {
	switch {
	case c.Interval == nil:
		return nil
	case !c.Watch:
		return []fault{{"--interval", "has no meaning without --watch"}}
	case *c.Interval < minWatch:
		return []fault{{"--interval", fmt.Sprintf("%v is under %v", *c.Interval, minWatch)}}
	}
	return nil
}

func (c statusCommand) run(ctx context.Context, cfg Config, std stdio) error {
	pause := 5 * time.Second
	if c.Interval != nil {
		pause = *c.Interval
	}
	for {
		err := c.look(ctx, cfg, std.out)
		switch {
		case !c.Watch:
			return err
		case ctx.Err() != nil: // interrupted, which is how it ends
			return nil
		case err != nil: // an outage is what a person may be watching
			fmt.Fprintf(std.err, "outbox-relay: %v\n", err)
		}
		if sleep(ctx, pause); ctx.Err() != nil {
			return nil
		}
	}
}

// look shows the status once. It connects anew each time, so that it outlives every outage.
func (c statusCommand) look(ctx context.Context, cfg Config, w io.Writer) error {
	o, err := openOperator(ctx, cfg, "status")
	if err != nil {
		return err
	}
	defer o.Close()
	s, err := o.status(ctx, cfg)
	if err != nil {
		return err
	}
	if c.JSON {
		return json.NewEncoder(w).Encode(s)
	}
	if c.Watch && isTerminal(w) {
		fmt.Fprint(w, "\x1b[H\x1b[2J") // home, and clear
	}
	_, err = fmt.Fprint(w, s)
	if c.Watch && err == nil {
		_, err = fmt.Fprintln(w)
	}
	return err
}

func isTerminal(w io.Writer) bool {
	f, ok := w.(*os.File)
	if !ok {
		return false
	}
	info, err := f.Stat()
	return err == nil && info.Mode()&os.ModeCharDevice != 0
}

// Status is how an outbox is. The names in JSON are documented in docs/commands.md, which a test
// compares, and stay what they are. Times are of the database's clock.
type Status struct {
	At            time.Time `json:"at"`
	Database      string    `json:"database"`
	Schema        string    `json:"schema"`
	ServerVersion string    `json:"server_version"`

	Paused      bool       `json:"paused"`
	PausedSince *time.Time `json:"paused_since"`
	PausedBy    string     `json:"paused_by"`

	Relays   []RelayStatus  `json:"relays"` // those that work come first
	Leader   LeaderStatus   `json:"leader"`
	Doorbell DoorbellStatus `json:"doorbell"`

	Pending       Count      `json:"pending"` // in backoff included
	OldestPending *float64   `json:"oldest_pending_seconds"`
	InBackoff     Count      `json:"in_backoff"`
	NextRetry     *time.Time `json:"next_retry_at"`
	DeadLetters   Count      `json:"dead_letters"`

	RateIn  float64 `json:"rate_in_per_second"`  // inserted, rolled back ones included
	RateOut float64 `json:"rate_out_per_second"` // settled: published or failed

	LastError   string     `json:"last_error"`
	LastErrorAt *time.Time `json:"last_error_at"`

	HeldAggregates Count           `json:"held_aggregates"`
	Held           []HeldAggregate `json:"held"`
}

// Count is a number of events or aggregates; AtLeast: counting was cut off there.
type Count struct {
	N       int64 `json:"count"`
	AtLeast bool  `json:"at_least"`
}

// RelayStatus is a session that works the outbox or stands by.
type RelayStatus struct {
	PID             int        `json:"pid"`
	Works           bool       `json:"works"`
	User            string     `json:"user"`
	ApplicationName string     `json:"application_name"`
	Address         string     `json:"address"` // empty when the role may not see it
	Since           *time.Time `json:"connected_since"`
	Broker          bool       `json:"broker_usable"`
	Listening       bool       `json:"listen_works"` // known of those that work
	Paused          bool       `json:"obeys_pause"`

	Relay bool `json:"-"` // it shows that it is one
	alone bool
	bell  bool
}

// ordering is the ORDERING of a relay that works, which its work lock shows.
func (r RelayStatus) ordering() string {
	if r.alone {
		return orderingAggregate
	}
	return orderingNone
}

// LeaderStatus is what the relay that works, or did last, has left in the database. Relays side
// by side (ORDERING=none) leave nothing.
type LeaderStatus struct {
	Name   string     `json:"name"`
	Since  *time.Time `json:"since"`
	Clean  bool       `json:"ended_in_order"`
	Deaths int        `json:"deaths_in_a_row"`
}

// DoorbellStatus is what writers meet when they commit.
type DoorbellStatus struct {
	State Doorbell `json:"state"`
	// SilentWriters inserted without ringing and are still in their transactions.
	SilentWriters int64    `json:"silent_writers"`
	OldestPID     int64    `json:"oldest_silent_writer_pid"` // 0 for a prepared transaction, or none
	OldestAge     *float64 `json:"oldest_silent_writer_seconds"`
	oldestWho     string
}

// HeldAggregate is one whose events wait behind a failed one.
type HeldAggregate struct {
	AggregateType string     `json:"aggregate_type"`
	AggregateID   string     `json:"aggregate_id"`
	EventID       string     `json:"event_id"` // of the failed one
	EventType     string     `json:"event_type"`
	Attempts      int        `json:"attempts"`
	Dead          bool       `json:"dead"`
	Since         time.Time  `json:"since"` // when the event was made, or became a dead letter
	RetryAt       *time.Time `json:"retry_at"`
	LastError     string     `json:"last_error"`
	Waiting       Count      `json:"waiting"`
}

// status looks at everything. It takes rateSample, and a little more with a large backlog.
func (o *operator) status(ctx context.Context, cfg Config) (*Status, error) {
	s, err := o.look(ctx, cfg)
	if err != nil {
		return nil, err
	}
	if err := s.readRates(ctx, o, cfg.Retention == retentionImmediate); err != nil {
		return nil, operatorError("measure rates", err)
	}
	return s, nil
}

// newStatus is a status of which nothing is read yet.
func (o *operator) newStatus() *Status {
	return &Status{Schema: o.schema, Relays: []RelayStatus{}, Held: []HeldAggregate{}}
}

// look is status without rates.
func (o *operator) look(ctx context.Context, cfg Config) (*Status, error) {
	s := o.newStatus()
	if err := s.read(ctx, o, cfg.OnDeadLetter == onDeadLetterHold); err != nil {
		return nil, operatorError("look at the outbox", err)
	}
	return s, nil
}

func (s *Status) read(ctx context.Context, o *operator, hold bool) error {
	tx, err := o.BeginTx(ctx, &sql.TxOptions{ReadOnly: true})
	if err != nil {
		return err
	}
	defer func() { _ = tx.Rollback() }()
	if _, err := tx.ExecContext(ctx, sqlfiles.Status("planner")); err != nil {
		return err
	}
	if err := s.readServer(ctx, tx); err != nil {
		return err
	}
	if s.Relays, err = readRelays(ctx, tx, o.table); err != nil {
		return err
	}
	if err := s.readDoorbell(ctx, tx, o.table); err != nil {
		return err
	}
	if err := s.readBacklog(ctx, tx); err != nil {
		return err
	}
	return s.readHeld(ctx, tx, hold)
}

// rowQuerier is a session or a transaction of one.
type rowQuerier interface {
	QueryContext(ctx context.Context, query string, args ...any) (*sql.Rows, error)
	QueryRowContext(ctx context.Context, query string, args ...any) *sql.Row
}

func (s *Status) readServer(ctx context.Context, q rowQuerier) error {
	if err := q.QueryRowContext(ctx, sqlfiles.Status("server")).Scan(&s.At, &s.Database, &s.ServerVersion); err != nil {
		return err
	}
	l := &s.Leader
	err := q.QueryRowContext(ctx, sqlfiles.Status("state")).Scan(&l.Name, &l.Since, &l.Clean, &l.Deaths,
		&s.PausedSince, &s.PausedBy, &s.LastError, &s.LastErrorAt)
	if errors.Is(err, sql.ErrNoRows) {
		return errors.New("table outbox_relay_state is empty: run `outbox-relay migrate`")
	}
	s.Paused = s.PausedSince != nil
	return err
}

// readRelays returns the sessions that hold the locks of the outbox, those that work first.
func readRelays(ctx context.Context, q rowQuerier, table uint32) ([]RelayStatus, error) {
	relays := []RelayStatus{}
	rows, err := q.QueryContext(ctx, sqlfiles.Status("relays"), int64(table))
	if err != nil {
		return nil, err
	}
	defer rows.Close()
	for rows.Next() {
		var r RelayStatus
		if err := rows.Scan(&r.PID, &r.Works, &r.alone, &r.bell, &r.Relay, &r.Broker, &r.Listening, &r.Paused,
			&r.User, &r.ApplicationName, &r.Address, &r.Since); err != nil {
			return nil, err
		}
		relays = append(relays, r)
	}
	return relays, rows.Err()
}

// readDoorbell says in which state the doorbell is, as far as locks tell: whoever is deaf and whoever
// is awake has given the lock up, and the one who cannot publish is deaf.
func (s *Status) readDoorbell(ctx context.Context, q rowQuerier, table uint32) error {
	d := &s.Doorbell
	d.State = Deaf
	for _, r := range s.Relays {
		switch {
		case r.bell:
			d.State = Asleep
		case r.Works && r.Broker && !r.Paused && d.State == Deaf:
			d.State = Awake
		}
	}
	var user, app string
	var since *time.Time
	err := q.QueryRowContext(ctx, sqlfiles.Status("silent writers"), int64(table)).
		Scan(&d.SilentWriters, &d.OldestPID, &user, &app, &since)
	switch {
	case errors.Is(err, sql.ErrNoRows):
		return nil
	case err != nil:
		return err
	case d.OldestPID == 0:
		d.oldestWho = "a prepared transaction, see pg_prepared_xacts"
	default:
		d.oldestWho = fmt.Sprintf("pid %d, user %s, application_name %q", d.OldestPID, user, app)
	}
	if since != nil {
		age := s.At.Sub(*since).Seconds()
		d.OldestAge = &age
	}
	return nil
}

func (s *Status) readBacklog(ctx context.Context, q rowQuerier) error {
	var fresh, retry, dead int64
	var oldest *time.Time
	err := q.QueryRowContext(ctx, sqlfiles.Status("backlog"), countLimit).Scan(&fresh, &retry, &dead, &oldest, &s.NextRetry)
	if err != nil {
		return err
	}
	cut := retry+dead >= countLimit // the failed ones are counted together
	s.Pending = Count{fresh + retry, cut || fresh >= countLimit}
	s.InBackoff, s.DeadLetters = Count{retry, cut}, Count{dead, cut}
	if oldest != nil {
		age := max(s.At.Sub(*oldest).Seconds(), 0)
		s.OldestPending = &age
	}
	return nil
}

func (s *Status) readHeld(ctx context.Context, q rowQuerier, hold bool) error {
	for _, r := range s.Relays {
		if r.Works && !r.alone {
			return nil // ORDERING=none: nobody waits for another
		}
	}
	rows, err := q.QueryContext(ctx, sqlfiles.Status("held"), heldLook, hold, heldShown)
	if err != nil {
		return err
	}
	defer rows.Close()
	for rows.Next() {
		var h HeldAggregate
		if err := rows.Scan(&s.HeldAggregates.N, &h.AggregateType, &h.AggregateID, &h.EventID, &h.EventType, &h.Attempts,
			&h.Dead, &h.Since, &h.RetryAt, &h.LastError, &h.Waiting.N, &h.Waiting.AtLeast); err != nil {
			return err
		}
		s.Held = append(s.Held, h)
	}
	s.HeldAggregates.AtLeast = s.InBackoff.N+s.DeadLetters.N >= heldLook
	return rows.Err()
}

// readRates watches the table's statistics for a while. immediate: what is published is deleted.
func (s *Status) readRates(ctx context.Context, o *operator, immediate bool) error {
	var in, out growth
	for began := time.Now(); ; {
		var inserted, updated, deleted int64
		err := o.QueryRowContext(ctx, sqlfiles.Status("counters"), int64(o.table)).Scan(&inserted, &updated, &deleted)
		if err != nil {
			return err
		}
		if immediate {
			updated += deleted
		}
		now := time.Since(began)
		in.add(now, inserted)
		out.add(now, updated)
		if now >= rateSample {
			break
		}
		if sleep(ctx, rateStep); ctx.Err() != nil {
			return ctx.Err()
		}
	}
	s.RateIn, s.RateOut = in.perSecond(), out.perSecond()
	return nil
}

// growth measures the rate of a counter that is seen to grow in leaps. The zero value has seen nothing.
type growth struct {
	seen          bool
	first, latest int64 // counts when the watch began, and now
	leapt         int64 // count after the first leap
	firstLeap     time.Duration
	lastLeap      time.Duration
	watched       time.Duration
}

func (g *growth) add(at time.Duration, n int64) {
	switch {
	case !g.seen:
		*g = growth{seen: true, first: n, latest: n}
	case n < g.latest: // statistics were reset
		*g = growth{seen: true, first: n, latest: n}
	case n > g.latest:
		if g.firstLeap == 0 {
			g.firstLeap, g.leapt = at, n
		}
		g.latest, g.lastLeap = n, at
	}
	g.watched = at
}

// smallGrowth is below what the time between leaps says nothing.
const smallGrowth = 50

func (g *growth) perSecond() float64 {
	grown, over := g.latest-g.first, g.watched
	if grown >= smallGrowth && g.lastLeap > g.firstLeap { // the first leap may have begun long ago
		grown, over = g.latest-g.leapt, g.lastLeap-g.firstLeap
	}
	if over <= 0 {
		return 0
	}
	return float64(grown) / over.Seconds()
}
