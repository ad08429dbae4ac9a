package main

import (
	"context"
	"database/sql"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/lib/pq"
	"github.com/lib/pq/pqerror"

	sqlfiles "outbox-relay/sql"
)

// ClaimQuery bounds a claim.
type ClaimQuery struct {
	Mark   int64    // fresh rows with a seq up to it are known to be dealt with
	Limit  int      // events at most
	Bytes  int64    // payload bytes at most; one event is claimed in any case
	InHand []string // ids claimed before and not settled yet
}

// Claim is what a claim found.
type Claim struct {
	Events []*Event
	More   bool // a limit was met: claim again
	Cut    bool // it was the limit of bytes: what was read beyond it was read in vain
	// Seen is the highest seq up to which every visible fresh row is in Events, in hand, or
	// behind a failed one; 0 when the claim says nothing.
	Seen       int64
	Xmin, Xmax int64         // of the claim's snapshot
	NextRetry  time.Duration // until the next failed event is due; 0 for none
}

// Claim finds the events to publish next. An ordered claim locks nothing. An unordered one locks
// its rows until Settle, and leaves no transaction open when it finds none.
func (s *WorkingSession) Claim(q ClaimQuery) (Claim, error) {
	if !s.ordered() {
		if _, err := s.exec("BEGIN ISOLATION LEVEL READ COMMITTED"); err != nil {
			return Claim{}, fmt.Errorf("claim: %w", err)
		}
		s.inTx = true
	}
	c, err := s.queryClaim(s.claim, q)
	if err != nil {
		return Claim{}, fmt.Errorf("claim: %w", err)
	}
	if s.inTx && len(c.Events) == 0 {
		return c, s.commit()
	}
	return c, nil
}

func (s *WorkingSession) commit() error {
	if _, err := s.exec("COMMIT"); err != nil {
		return fmt.Errorf("commit: %w", err)
	}
	s.inTx = false
	return nil
}

func (s *WorkingSession) queryClaim(stmt *sql.Stmt, q ClaimQuery) (Claim, error) {
	sent := time.Now()
	args := []any{q.Mark, q.Limit, q.Bytes, s.st.cfg.AMQPMaxMessageBytes, uuidArray(q.InHand)}
	if s.ordered() {
		args = append(args, s.st.cfg.OnDeadLetter == onDeadLetterHold)
	}
	rows, err := stmt.QueryContext(context.Background(), args...)
	if err != nil {
		return Claim{}, err
	}
	defer rows.Close()

	var c Claim
	var highest, lastFresh int64
	var retries, fresh, found int
	for rows.Next() {
		var r claimRow
		if err := rows.Scan(&r.kind, &r.n, &r.retry, &r.id, &r.seq, &r.aggregateType, &r.aggregateID, &r.eventType,
			&r.body, &r.bytes, &r.oversized, &r.headers, &r.attempts, &r.createdUS, &r.isolate,
			&r.retries, &r.fresh, &r.retryMS, &r.xmin, &r.xmax); err != nil {
			return Claim{}, err
		}
		if r.kind == 0 {
			highest, retries, fresh = r.seq.Int64, int(r.retries.Int64), int(r.fresh.Int64)
			c.NextRetry = time.Duration(max(r.retryMS.Int64, 1)) * time.Millisecond
			if !r.retryMS.Valid {
				c.NextRetry = 0
			}
			c.Xmin, c.Xmax = r.xmin.Int64, r.xmax.Int64
			continue
		}
		e := r.event(s.contentType)
		if !e.Retried {
			lastFresh = e.Seq
		}
		c.Events = append(c.Events, e)
		found++
	}
	if err := rows.Err(); err != nil {
		return Claim{}, err
	}
	s.answered(sent)
	c.Cut = found < min(retries+fresh, q.Limit)
	c.More = c.Cut || fresh == q.Limit || retries == (q.Limit+1)/2 || found < retries+fresh
	c.Seen = highest
	if c.More { // rows of one seq, that is of seq 0, may have been cut apart
		c.Seen = max(lastFresh, 0)
	}
	return c, nil
}

// claimRow is a row of claim.sql.
type claimRow struct {
	kind, n                             int
	retry, oversized, isolate           sql.NullBool
	id, aggregateType, aggregateID      sql.NullString
	eventType                           sql.NullString
	seq, bytes, attempts, createdUS     sql.NullInt64
	body, headers                       []byte
	retries, fresh, retryMS, xmin, xmax sql.NullInt64
}

func (r *claimRow) event(contentType string) *Event {
	e := &Event{
		ID: r.id.String, Seq: r.seq.Int64,
		AggregateType: r.aggregateType.String, AggregateID: r.aggregateID.String, EventType: r.eventType.String,
		Payload: r.body, PayloadBytes: int(r.bytes.Int64), Oversized: r.oversized.Bool,
		ContentType: contentType, Headers: r.headers, Attempts: int(r.attempts.Int64),
		Isolate: r.isolate.Bool, Retried: r.retry.Bool,
	}
	if r.createdUS.Valid {
		e.CreatedAt = time.UnixMicro(r.createdUS.Int64)
	}
	return e
}

// Failure is a failed attempt, or a postponement when Attempts is what it was.
type Failure struct {
	Event     *Event
	Attempts  int           // counted from now on
	Retry     time.Duration // from now
	Dead      bool          // becomes a dead letter,
	DeadAfter time.Duration // if it is at least this old
	Reason    string
}

// Settlement is what to mark in one commit.
type Settlement struct {
	Confirmed []*Event
	Failed    []Failure
}

// Settled is what a settle did.
type Settled struct {
	Changed int      // rows
	Locked  []string // ids of rows that another session has locked: to be settled again
}

// Settle marks what became of events, in one commit.
func (s *WorkingSession) Settle(st Settlement) (Settled, error) {
	changed, err := s.querySettle(s.settle, st)
	if s.ordered() && pq.As(err, pqerror.LockNotAvailable) != nil {
		changed, err = s.settleUnlocked(st)
	}
	if err == nil && s.inTx {
		err = s.commit()
	}
	done := Settled{Changed: len(changed)}
	if err == nil && len(changed) < len(st.Confirmed)+len(st.Failed) {
		done.Locked, err = s.unsettled(st, changed)
	}
	if err != nil {
		return Settled{}, fmt.Errorf("settle: %w", err)
	}
	return done, nil
}

// settleUnlocked is for when a row is locked: rare enough not to keep the statement.
func (s *WorkingSession) settleUnlocked(st Settlement) (changed []string, err error) {
	stmt, err := s.prepare(sqlfiles.Settle(s.st.cfg.Retention == retentionImmediate, true))
	if err != nil {
		return nil, err
	}
	defer func() { _ = stmt.Close() }()
	return s.querySettle(stmt, st)
}

func (s *WorkingSession) querySettle(stmt *sql.Stmt, st Settlement) (changed []string, err error) {
	confirmed := make([]string, len(st.Confirmed))
	for i, e := range st.Confirmed {
		confirmed[i] = e.ID
	}
	ids, reasons := make([]string, len(st.Failed)), make([]string, len(st.Failed))
	claimed, attempts := make([]int, len(st.Failed)), make([]int, len(st.Failed))
	retries := make([]int64, len(st.Failed))
	dead := make([]sql.NullInt64, len(st.Failed))
	for i, f := range st.Failed {
		ids[i], reasons[i] = f.Event.ID, storable(f.Reason)
		claimed[i], attempts[i] = f.Event.Attempts, f.Attempts
		retries[i] = f.Retry.Milliseconds()
		dead[i] = sql.NullInt64{Int64: f.DeadAfter.Milliseconds(), Valid: f.Dead}
	}
	sent := time.Now()
	rows, err := stmt.QueryContext(context.Background(), uuidArray(confirmed), uuidArray(ids), intArray(claimed),
		intArray(attempts), intArray(retries), pq.Array(dead), pq.Array(reasons))
	if err != nil {
		return nil, err
	}
	changed, err = collectStrings(rows)
	if err == nil {
		s.answered(sent)
	}
	return changed, err
}

// unsettled tells rows that are locked from those that somebody else has dealt with.
func (s *WorkingSession) unsettled(st Settlement, changed []string) (locked []string, err error) {
	attempts := make(map[string]int) // as they must be for the row to be ours to mark
	for _, e := range st.Confirmed {
		attempts[e.ID] = -1 // any
	}
	for _, f := range st.Failed {
		attempts[f.Event.ID] = f.Event.Attempts
	}
	for _, id := range changed {
		delete(attempts, id)
	}
	left := make([]string, 0, len(attempts))
	for id := range attempts {
		left = append(left, id)
	}
	rows, err := s.conn.QueryContext(context.Background(), sqlfiles.Session("unsettled"), uuidArray(left))
	if err != nil {
		return nil, err
	}
	defer rows.Close()
	for rows.Next() {
		var id string
		var n int
		if err := rows.Scan(&id, &n); err != nil {
			return nil, err
		}
		if want := attempts[id]; want == -1 || want == n {
			locked = append(locked, id)
		}
	}
	slices.Sort(locked)
	return locked, rows.Err()
}

func collectStrings(rows *sql.Rows) ([]string, error) {
	defer rows.Close()
	var all []string
	for rows.Next() {
		var s string
		if err := rows.Scan(&s); err != nil {
			return nil, err
		}
		all = append(all, s)
	}
	return all, rows.Err()
}

// maxReasonBytes bounds last_error.
const maxReasonBytes = 1000

// storable makes a broker's words fit to be stored: valid, without NUL, and not endless.
func storable(reason string) string {
	reason = strings.ReplaceAll(reason, "\x00", "")
	if len(reason) > maxReasonBytes {
		reason = reason[:maxReasonBytes] + "..."
	}
	return strings.ToValidUTF8(reason, "\uFFFD")
}
