package main

import (
	"bytes"
	"context"
	"database/sql"
	"database/sql/driver"
	"encoding/json"
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
	Released   int64         // how often dead letters were retried or discarded so far
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
	if s.mayBeFew(q) {
		c, ok, err := s.queryFew(q)
		switch {
		case err != nil:
			return Claim{}, fmt.Errorf("claim few: %w", err)
		case ok:
			return c, nil
		}
		s.declined = time.Now()
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

const (
	// few is up to how many events claim_few.sql claims, and fewBytes the stored size of a payload
	// up to which it does: about what lies in the row itself.
	few      = 16
	fewBytes = 2000
	// fewRest is how long claim_few.sql is not asked after it declined: a busy outbox would do so each time.
	fewRest = time.Second
)

// mayBeFew reports whether it is worth asking claim_few.sql.
func (s *WorkingSession) mayBeFew(q ClaimQuery) bool {
	return s.ordered() && q.Limit > few && time.Since(s.declined) >= fewRest
}

// queryFew claims by claim_few.sql. It returns false when that declined, or found more than q allows.
func (s *WorkingSession) queryFew(q ClaimQuery) (c Claim, ok bool, err error) {
	args := []driver.Value{q.Mark, int64(few), int64(fewBytes), s.st.cfg.OnDeadLetter == onDeadLetterHold}
	rows, declined, size := 0, false, int64(0)
	err = s.query(s.claimFew, args, func(row []driver.Value) error {
		rows++
		c.Released, _ = row[13].(int64)
		c.Xmin, _ = row[14].(int64)
		c.Xmax, _ = row[15].(int64)
		if d, _ := row[16].(bool); d {
			declined = true
		}
		if declined || row[1] == nil {
			return nil
		}
		e := eventOf(row, s.contentType)
		c.Seen = e.Seq
		if slices.Contains(q.InHand, e.ID) {
			return nil
		}
		c.Events = append(c.Events, e)
		size += int64(len(e.Payload) + len(e.Headers))
		declined = int64(len(e.Payload)) > s.st.cfg.AMQPMaxMessageBytes
		return nil
	})
	return c, 0 < rows && rows <= few && !declined && size <= q.Bytes, err
}

func (s *WorkingSession) commit() error {
	if _, err := s.exec("COMMIT"); err != nil {
		return fmt.Errorf("commit: %w", err)
	}
	s.inTx = false
	return nil
}

func (s *WorkingSession) queryClaim(stmt driver.Stmt, q ClaimQuery) (Claim, error) {
	args := []driver.Value{q.Mark, int64(q.Limit), q.Bytes, s.st.cfg.AMQPMaxMessageBytes, uuidArray(q.InHand)}
	if s.ordered() {
		args = append(args, s.st.cfg.OnDeadLetter == onDeadLetterHold)
	}
	var c Claim
	var facts claimFacts
	var lastFresh int64
	err := s.query(stmt, args, func(row []driver.Value) error {
		if text, ok := row[0].(string); ok {
			return json.Unmarshal([]byte(text), &facts)
		}
		e := eventOf(row, s.contentType)
		if !e.Retried {
			lastFresh = e.Seq
		}
		c.Events = append(c.Events, e)
		return nil
	})
	if err != nil {
		return Claim{}, err
	}
	found := len(c.Events)
	c.Cut = found < min(facts.Retries+facts.Fresh, q.Limit)
	c.More = c.Cut || facts.Fresh == q.Limit || facts.Retries == (q.Limit+1)/2 || found < facts.Retries+facts.Fresh
	c.Seen = facts.Highest
	if c.More { // rows of one seq, that is of seq 0, may have been cut apart
		c.Seen = max(lastFresh, 0)
	}
	c.Xmin, c.Xmax, c.Released = facts.Xmin, facts.Xmax, facts.Released
	if facts.RetryMS != nil {
		c.NextRetry = time.Duration(max(*facts.RetryMS, 1)) * time.Millisecond
	}
	return c, nil
}

// claimFacts is what the first row of claim.sql says.
type claimFacts struct {
	Highest        int64
	Retries, Fresh int    // rows found, before the bound in bytes
	RetryMS        *int64 `json:"retry_ms"`
	Xmin, Xmax     int64
	Released       int64
}

// eventOf reads one of the other rows of claim.sql, behind its first column.
func eventOf(row []driver.Value, contentType string) *Event {
	e := &Event{ContentType: contentType}
	e.ID, _ = row[1].(string)
	e.Seq, _ = row[2].(int64)
	e.AggregateType, _ = row[3].(string)
	e.AggregateID, _ = row[4].(string)
	e.EventType, _ = row[5].(string)
	switch body := row[6].(type) {
	case string:
		e.Payload = []byte(body)
	case []byte: // lies in the connection's buffer
		e.Payload = bytes.Clone(body)
	}
	e.PayloadBytes = len(e.Payload)
	if size, ok := row[7].(int64); ok {
		e.Oversized, e.PayloadBytes = true, int(size)
	}
	if headers, ok := row[8].(string); ok {
		e.Headers = []byte(headers)
	}
	attempts, _ := row[9].(int64)
	e.Attempts = int(attempts)
	if us, ok := row[10].(int64); ok {
		e.CreatedAt = time.UnixMicro(us)
	}
	e.Retried, _ = row[11].(bool)
	e.Isolate, _ = row[12].(bool)
	return e
}

// Failure is a failed attempt, or a postponement when Attempts is what it was.
type Failure struct {
	Event     *Event
	Attempts  int           // counted from now on
	Retry     time.Duration // from now
	Dead      bool          // becomes a dead letter,
	DeadAfter time.Duration // if it is at least this old
	Reason    string        // "" leaves last_error as it is
}

// Settlement is what to mark in one commit.
type Settlement struct {
	Confirmed []*Event
	Failed    []Failure
	Flush     bool // return only when it is on disk
	// SkipLocked: another session has rows locked, or may have, and is not to be waited for.
	SkipLocked bool
}

// Settled is what a settle did.
type Settled struct {
	Changed int      // rows
	Locked  []string // ids of rows that another session has locked: to be settled again
}

// Settle marks what became of events, in one commit.
func (s *WorkingSession) Settle(st Settlement) (Settled, error) {
	settle := func(st Settlement) (int, []string, error) { return s.querySettle(s.settle, st) }
	if st.SkipLocked && !s.inTx { // within a batch of ours all rows are locked by ourselves
		settle = s.settleUnlocked
	}
	changed, failed, err := settle(st)
	if !s.inTx && pq.As(err, pqerror.LockNotAvailable) != nil {
		changed, failed, err = s.settleUnlocked(st)
	}
	if err == nil && s.inTx {
		err = s.commit()
	}
	done := Settled{Changed: changed}
	if err == nil && changed < len(st.Confirmed)+len(st.Failed) {
		done.Locked, err = s.unsettled(st, failed)
	}
	if err != nil {
		return Settled{}, fmt.Errorf("settle: %w", err)
	}
	return done, nil
}

// settleUnlocked is for when a row is locked: rare enough not to keep the statement.
func (s *WorkingSession) settleUnlocked(st Settlement) (changed int, failed []string, err error) {
	stmt, err := s.prepare(sqlfiles.Settle(s.st.cfg.Retention == retentionImmediate, true))
	if err != nil {
		return 0, nil, err
	}
	defer func() { _ = s.conn.Raw(func(any) error { return stmt.Close() }) }()
	return s.querySettle(stmt, st)
}

// querySettle returns how many rows were changed, and which of the failed ones are among them.
func (s *WorkingSession) querySettle(stmt driver.Stmt, st Settlement) (changed int, failed []string, err error) {
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
	args := []driver.Value{uuidArray(confirmed), uuidArray(ids), intArray(claimed), intArray(attempts), intArray(retries), nil, nil, st.Flush}
	if args[5], err = pq.Array(dead).Value(); err != nil {
		return 0, nil, err
	}
	if args[6], err = pq.Array(reasons).Value(); err != nil {
		return 0, nil, err
	}
	err = s.query(stmt, args, func(row []driver.Value) error {
		n, _ := row[0].(int64)
		changed += int(n)
		return (*pq.StringArray)(&failed).Scan(row[1])
	})
	return changed + len(failed), failed, err
}

// unsettled tells rows that are locked from those that somebody else has dealt with. failed are the
// failed ones that were changed.
func (s *WorkingSession) unsettled(st Settlement, failed []string) (locked []string, err error) {
	attempts := make(map[string]int) // as they must be for the row to be ours to mark
	for _, e := range st.Confirmed {
		attempts[e.ID] = -1 // any
	}
	for _, f := range st.Failed {
		attempts[f.Event.ID] = f.Event.Attempts
	}
	for _, id := range failed {
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
