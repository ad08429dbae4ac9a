package loadtest

import (
	"context"
	"database/sql"
	"fmt"
	"testing"
	"time"

	"github.com/lib/pq"
)

// Oracle says what became of the committed events. The table tells which those are: where a server
// died in a commit, nobody else knows. Not safe for concurrent use.
type Oracle struct {
	db       *sql.DB
	consumer *Consumer

	events  map[ID]*event    // known to be committed
	missing int              // of these, not delivered yet
	looked  int              // deliveries judged
	last    map[string]int64 // by aggregate: the highest seq of its first deliveries
	from    int64            // rows up to this seq are known
	highest int64            // at the last check
	marred  map[string]bool  // reported
}

type event struct {
	aggregate string
	seq       int64
	delivered bool
}

// Verdict is what a check found since the one before. Everything but Events and Duplicated must be
// empty.
type Verdict struct {
	Events     int      // committed
	Duplicated int      // deliveries beyond the first that the relay caused
	Lost       []string // committed and not delivered
	Strangers  []string // delivered and not in the table: rolled back, or never written
	Disordered []string // first deliveries after that of a later event of their aggregate
	Unmarked   []string // delivered and not marked
	Marred     []string // attempts were counted, or an error noted
}

// Faults returns everything in v that must not be, in words.
func (v Verdict) Faults() []string {
	var all []string
	for _, kind := range []struct {
		what   string
		events []string
	}{
		{"lost", v.Lost},
		{"delivered but not in the table", v.Strangers},
		{"out of order", v.Disordered},
		{"not marked", v.Unmarked},
		{"failed", v.Marred},
	} {
		for i, e := range kind.events {
			if i == 3 {
				all = append(all, fmt.Sprintf("%s: %d in all", kind.what, len(kind.events)))
				break
			}
			all = append(all, kind.what+": "+e)
		}
	}
	return all
}

// NewOracle makes an oracle for the outbox at dsn and what reaches consumer.
func NewOracle(t testing.TB, dsn string, consumer *Consumer) *Oracle {
	t.Helper()
	db, err := openDB(dsn)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = db.Close() })
	return &Oracle{db: db, consumer: consumer, events: make(map[ID]*event), last: make(map[string]int64), marred: make(map[string]bool)}
}

// Check judges all events committed so far and their deliveries. The load must be held. It waits for
// events that are still under way as long as some arrive within patience. An error says that the
// database could not be asked.
func (o *Oracle) Check(ctx context.Context, patience time.Duration) (Verdict, error) {
	var v Verdict
	known := len(o.events)
	if err := o.learn(ctx, eventsAfter, o.from); err != nil {
		return v, err
	}
	// A server may commit after its client has given up, so look a little further back next time.
	o.from = o.highest
	for _, e := range o.events {
		o.highest = max(o.highest, e.seq)
	}

	progress, pending := time.Now(), -1
	for {
		if n := o.consumer.Count(); n > o.looked {
			progress = time.Now()
		}
		if err := o.judge(ctx, &v); err != nil {
			return v, err
		}
		var now int
		err := o.db.QueryRowContext(ctx, `SELECT count(*) FROM outbox_events WHERE processed_at IS NULL`).Scan(&now)
		if err != nil {
			return v, fmt.Errorf("count pending events: %w", err)
		}
		if now != pending {
			pending, progress = now, time.Now()
		}
		if pending == 0 && o.missing == 0 || time.Since(progress) > patience {
			break
		}
		time.Sleep(20 * time.Millisecond)
	}
	v.Events = len(o.events) - known
	for id, e := range o.events {
		if !e.delivered {
			v.Lost = append(v.Lost, fmt.Sprintf("event %s, seq %d of %s", id, e.seq, e.aggregate))
		}
	}
	var err error
	if v.Unmarked, err = o.rows(ctx, `processed_at IS NULL`); err != nil {
		return v, err
	}
	// An unordered relay keeps what is in flight to a blocked broker from others by a retry_after.
	marred, err := o.rows(ctx, `attempts <> 0 OR dead_at IS NOT NULL
		OR (last_error IS NOT NULL OR retry_after IS NOT NULL) AND last_error IS DISTINCT FROM 'in flight while the broker is blocked'`)
	for _, row := range marred {
		if !o.marred[row] {
			o.marred[row] = true
			v.Marred = append(v.Marred, row)
		}
	}
	v.Strangers = append(v.Strangers, o.consumer.Foreign()...)
	return v, err
}

// judge looks at the deliveries that came since it last did.
func (o *Oracle) judge(ctx context.Context, v *Verdict) error {
	for _, d := range o.consumer.Received(o.looked) {
		e := o.events[d.ID]
		if e == nil {
			if err := o.learn(ctx, eventOfID, d.ID.String()); err != nil {
				return err
			}
			e = o.events[d.ID]
		}
		o.looked++
		switch {
		case e == nil:
			v.Strangers = append(v.Strangers, "event "+d.ID.String())
		case !e.delivered:
			e.delivered = true
			o.missing--
			if last := o.last[e.aggregate]; e.seq < last {
				v.Disordered = append(v.Disordered, fmt.Sprintf("event %s, seq %d of %s, after seq %d", d.ID, e.seq, e.aggregate, last))
			}
			o.last[e.aggregate] = max(o.last[e.aggregate], e.seq)
		case !d.Redelivered:
			v.Duplicated++
		}
	}
	return nil
}

// Queries of committed events, for learn.
const (
	eventsAfter = `SELECT id, aggregate_type || ' ' || aggregate_id, seq FROM outbox_events WHERE seq > $1`
	eventOfID   = `SELECT id, aggregate_type || ' ' || aggregate_id, seq FROM outbox_events WHERE id = $1`
)

// learn adds committed events to those that are known.
func (o *Oracle) learn(ctx context.Context, query string, arg any) error {
	rows, err := o.db.QueryContext(ctx, query, arg)
	if err != nil {
		return fmt.Errorf("read committed events: %w", err)
	}
	defer func() { _ = rows.Close() }()
	for rows.Next() {
		var text string
		e := new(event)
		if err := rows.Scan(&text, &e.aggregate, &e.seq); err != nil {
			return err
		}
		id, err := ParseID(text)
		if err != nil {
			return err
		}
		if o.events[id] == nil {
			o.events[id] = e
			o.missing++
		}
	}
	return rows.Err()
}

// rows describes the rows that a condition holds for.
func (o *Oracle) rows(ctx context.Context, where string) ([]string, error) {
	var found pq.StringArray
	err := o.db.QueryRowContext(ctx,
		`SELECT array_agg(format('event %s, seq %s: attempts %s, last_error %s, retry_after %s, dead_at %s',
		                         id, seq, attempts, last_error, retry_after, dead_at))
		 FROM (SELECT * FROM outbox_events WHERE `+where+` LIMIT 100) e`).Scan(&found)
	if err != nil {
		return nil, fmt.Errorf("read events: %w", err)
	}
	return found, nil
}
