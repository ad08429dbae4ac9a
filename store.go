package main

import (
	"cmp"
	"context"
	"database/sql"
	"database/sql/driver"
	"errors"
	"fmt"
	"io"
	"strconv"
	"strings"
	"sync/atomic"
	"time"

	"github.com/lib/pq"
	"github.com/lib/pq/pqerror"

	"outbox-relay/internal/boundedconn"
	sqlfiles "outbox-relay/sql"
)

const (
	// connectTimeout bounds dialling PostgreSQL and each write to it.
	connectTimeout = 5 * time.Second
	// answerTimeout is the longest wait for an answer of PostgreSQL: a little over the
	// statement_timeout that sql/session.sql sets, so that the server is the first to give up.
	answerTimeout = 12 * time.Second
	// leaseTime is how long after an answer of PostgreSQL the relay may still publish: half of the
	// time after which the server ends a silent session and with it the locks.
	leaseTime = 6 * time.Second
	// minServerVersion is 14.0.
	minServerVersion = 140000
)

var (
	// errReadOnly: the server takes no writes, or not from this role.
	errReadOnly = errors.New("the server is read-only now: it may have been demoted, or default_transaction_read_only is on")
	// errTableSwapped: outbox_events is another table than when the session began.
	errTableSwapped = errors.New("outbox_events is another table now")
)

// Store makes working sessions in PostgreSQL. Its methods may be called by several goroutines.
type Store struct {
	cfg     Config
	leading atomic.Bool  // the working session has the work lock, as far as we know
	last    atomic.Int64 // when the query was sent that PostgreSQL answered last, as monotonic nanoseconds since start
}

// start makes monotonic readings small numbers.
var start = time.Now()

// NewStore makes a store; it connects to nothing.
func NewStore(cfg Config) *Store { return &Store{cfg: cfg} }

// Leased reports whether we have the work lock and heard of its session recently enough to be sure
// of it. Safe for any goroutine.
func (st *Store) Leased() bool {
	last := st.last.Load()
	return st.leading.Load() && last != 0 && time.Since(start)-time.Duration(last) < leaseTime
}

// WorkingSession is the one server session that holds the relay's locks and runs claim and
// settle. It is never repaired: any error discards it, and with it the locks. Not safe for
// concurrent use.
//
// Contexts play no part in it, since cancelling one would end the session: time is bounded by
// statement_timeout and by limits on every read and write of its connection.
type WorkingSession struct {
	st          *Store
	db          *sql.DB
	conn        *sql.Conn
	claim       driver.Stmt
	claimFew    driver.Stmt // nil when unordered
	declined    time.Time   // when it last could not do
	settle      driver.Stmt
	table       uint32 // oid of outbox_events
	payloadType string // of the column, as PostgreSQL spells it
	contentType string
	clockAhead  time.Duration // of the server's clock before ours
	inTx        bool          // a batch of an unordered outbox is open
	led         bool          // the work lock was had
}

// Open makes a session that holds no locks yet. ctx ends the connecting only.
func (st *Store) Open(ctx context.Context) (*WorkingSession, error) {
	s := &WorkingSession{st: st}
	if err := s.open(ctx); err != nil {
		s.Discard()
		return nil, err
	}
	return s, nil
}

func (s *WorkingSession) open(ctx context.Context) error {
	db, err := openDatabase(s.st.cfg)
	if err != nil {
		return err
	}
	s.db = db
	if s.conn, err = db.Conn(ctx); err != nil {
		return err
	}
	var table sql.NullInt64
	var payloadType sql.NullString
	var pid, version int
	var standby bool
	var clock int64
	sent := time.Now()
	err = s.conn.QueryRowContext(context.Background(), sqlfiles.Session("facts")).
		Scan(&table, &payloadType, &pid, &standby, &version, &clock)
	switch {
	case errors.Is(err, sql.ErrNoRows):
		return errNoTable
	case err != nil:
		return err
	case version < minServerVersion:
		return fmt.Errorf("PostgreSQL %d is too old: the relay needs 14 or later", version/10000)
	case standby:
		return errors.New("the server is a read-only standby: name the primary, or all hosts and target_session_attrs=read-write")
	}
	s.clockAhead = time.UnixMicro(clock).Sub(sent.Add(time.Since(sent) / 2))
	s.table = uint32(table.Int64)
	s.payloadType = payloadType.String
	s.contentType = contentTypes[payloadType.String]
	if s.contentType == "" {
		if err := notOurs(ctx, s.st.cfg); err != nil {
			return err
		}
		return fmt.Errorf("outbox_events.payload is of type %q: it must be jsonb, json, text or bytea", payloadType.String)
	}
	if err := refusePooler(ctx, s.db, s.conn, pid); err != nil {
		return err // before anything is set, which a pooler would hand to others
	}
	if _, err := s.exec(sqlfiles.Session("setup")); err != nil {
		return err
	}
	if s.claim, err = s.prepare(sqlfiles.Claim(s.ordered(), false, payloadType.String)); err != nil {
		if pq.As(err, pqerror.UndefinedColumn) != nil {
			return cmp.Or(notOurs(ctx, s.st.cfg), err)
		}
		return err
	}
	if s.ordered() {
		if s.claimFew, err = s.prepare(sqlfiles.ClaimFew(payloadType.String)); err != nil {
			return err
		}
	}
	s.settle, err = s.prepare(sqlfiles.Settle(s.st.cfg.Retention == retentionImmediate, false))
	return err
}

// contentTypes maps the payload column's type to the content type of messages.
var contentTypes = map[string]string{
	"jsonb": "application/json", "json": "application/json",
	"text": "text/plain", "character varying": "text/plain",
	"bytea": "application/octet-stream",
}

// openDatabase makes a pool whose connections are bounded in every read and write.
func openDatabase(cfg Config) (*sql.DB, error) {
	dsn, err := cfg.databaseDSN()
	if err != nil {
		return nil, err
	}
	connector, err := pq.NewConnector(dsn)
	if err != nil {
		return nil, err
	}
	connector.Dialer(boundedconn.Dialer{ConnectTimeout: connectTimeout, ReadTimeout: answerTimeout, WriteTimeout: connectTimeout})
	return sql.OpenDB(connector), nil
}

// prepare prepares a statement below database/sql, for query.
func (s *WorkingSession) prepare(query string) (stmt driver.Stmt, err error) {
	err = s.conn.Raw(func(conn any) (err error) {
		stmt, err = conn.(driver.ConnPrepareContext).PrepareContext(context.Background(), query)
		return err
	})
	return stmt, explained(err)
}

// query runs a statement and hands each row to visit, which must not keep it, nor any []byte in it. It goes past
// database/sql, whose locks and conversions for each value are a tenth of the relay's work.
func (s *WorkingSession) query(stmt driver.Stmt, args []driver.Value, visit func(row []driver.Value) error) error {
	named := make([]driver.NamedValue, len(args))
	for i, v := range args {
		named[i] = driver.NamedValue{Ordinal: i + 1, Value: v}
	}
	sent := time.Now()
	err := s.conn.Raw(func(any) error {
		rows, err := stmt.(driver.StmtQueryContext).QueryContext(context.Background(), named)
		if err != nil {
			return err
		}
		row := make([]driver.Value, len(rows.Columns()))
		for err = rows.Next(row); err == nil; err = rows.Next(row) {
			if err = visit(row); err != nil {
				break
			}
		}
		if errors.Is(err, io.EOF) {
			err = nil
		}
		return errors.Join(err, rows.Close())
	})
	if err == nil {
		s.answered(sent)
	}
	return err
}

func (s *WorkingSession) ordered() bool { return s.st.cfg.Ordering == orderingAggregate }

// answered renews the lease: PostgreSQL answered what was sent at that time.
func (s *WorkingSession) answered(sent time.Time) {
	s.st.last.Store(int64(sent.Sub(start)))
}

// ClockAhead is how far the server's clock was before ours when the session began.
func (s *WorkingSession) ClockAhead() time.Duration { return s.clockAhead }

func (s *WorkingSession) exec(query string, args ...any) (sql.Result, error) {
	sent := time.Now()
	res, err := s.conn.ExecContext(context.Background(), query, args...)
	if err == nil {
		s.answered(sent)
	}
	return res, err
}

func (s *WorkingSession) queryRow(query string, dest []any, args ...any) error {
	sent := time.Now()
	err := s.conn.QueryRowContext(context.Background(), query, args...).Scan(dest...)
	if err == nil {
		s.answered(sent)
	}
	return err
}

// Lead tries to get the work lock: alone when ORDERING=aggregate, beside other relays of the
// same kind when ORDERING=none. It never waits. deaths is how many leaders in a row ended
// without an end in order; again: this one led before and lost its session, which is no death. Of
// relays side by side that is not known.
func (s *WorkingSession) Lead(name string, again bool) (led bool, deaths int, err error) {
	lock := "work lock shared"
	if s.ordered() {
		lock = "work lock exclusive"
	}
	if err := s.queryRow(sqlfiles.SessionLock(lock, sqlfiles.WorkLockClass, s.table), []any{&s.led}); err != nil {
		return false, 0, fmt.Errorf("try the work lock: %w", err)
	}
	if s.led && s.ordered() {
		if err := s.queryRow(sqlfiles.Session("begin work"), []any{&deaths}, name, again); err != nil {
			return false, 0, fmt.Errorf("note the leader: %w", err)
		}
	}
	s.st.leading.Store(s.led)
	return s.led, deaths, nil
}

// Holder is who has the work lock.
type Holder struct {
	PID             int
	User            string
	ApplicationName string
	MayBeRelay      bool // it bears our application_name, or one we may not see
	Alone           bool // it works alone, as with ORDERING=aggregate
}

func (h Holder) String() string {
	return fmt.Sprintf("pid %d, user %s, application_name %q", h.PID, h.User, h.ApplicationName)
}

// ordering is the ORDERING of a holder that is a relay.
func (h Holder) ordering() string {
	if h.Alone {
		return orderingAggregate
	}
	return orderingNone
}

// Holder returns a holder of the work lock; the zero Holder when there is none any more.
func (s *WorkingSession) Holder() (Holder, error) {
	var h Holder
	err := s.queryRow(sqlfiles.SessionLock("work lock holder", sqlfiles.WorkLockClass, s.table), []any{&h.PID, &h.User, &h.ApplicationName, &h.MayBeRelay, &h.Alone})
	if err != nil && !errors.Is(err, sql.ErrNoRows) {
		return h, fmt.Errorf("look who holds the work lock: %w", err)
	}
	return h, nil
}

// Keep tries to become the relay that keeps the doorbell; of several that work side by side one
// does. Whoever works alone keeps it anyway.
func (s *WorkingSession) Keep() (kept bool, err error) {
	if s.ordered() {
		return true, nil
	}
	if err := s.queryRow(sqlfiles.SessionLock("keeper try", sqlfiles.KeeperLockClass, s.table), []any{&kept}); err != nil {
		return false, fmt.Errorf("try the keeper lock: %w", err)
	}
	return kept, nil
}

// TryDoorbell tries to get the doorbell lock, with which every writer's commit rings.
func (s *WorkingSession) TryDoorbell() (got bool, err error) {
	if err := s.queryRow(sqlfiles.SessionLock("doorbell try", sqlfiles.DoorbellLockClass, s.table), []any{&got}); err != nil {
		return false, fmt.Errorf("try the doorbell lock: %w", err)
	}
	return got, nil
}

// ReleaseDoorbell lets writers be silent.
func (s *WorkingSession) ReleaseDoorbell() error {
	var had bool
	if err := s.queryRow(sqlfiles.SessionLock("doorbell release", sqlfiles.DoorbellLockClass, s.table), []any{&had}); err != nil {
		return fmt.Errorf("release the doorbell lock: %w", err)
	}
	return nil
}

// Beat proves that the session lives, renews the lease, and reports whether the outbox is paused.
func (s *WorkingSession) Beat() (paused bool, err error) {
	var readOnly bool
	var table int64
	if err := s.queryRow(sqlfiles.Session("beat"), []any{&readOnly, &paused, &table}); err != nil {
		return false, fmt.Errorf("beat: %w", err)
	}
	switch {
	case readOnly:
		return false, errReadOnly
	case uint32(table) != s.table:
		return false, errTableSwapped
	}
	return paused, nil
}

// Probe notifies channel, to prove that notifications arrive.
func (s *WorkingSession) Probe(channel string) error {
	if _, err := s.exec(sqlfiles.Session("probe"), channel); err != nil {
		return fmt.Errorf("probe notifications: %w", err)
	}
	return nil
}

// Table is the oid of outbox_events.
func (s *WorkingSession) Table() uint32 { return s.table }

// CallOthers notifies as the trigger does, for relays that work beside this one: while writers are silent only the
// keeper of the doorbell looks for events. Within a batch that is open they hear it with its commit.
func (s *WorkingSession) CallOthers() error {
	if _, err := s.exec(sqlfiles.Session("call others"), sqlfiles.Channel, strconv.FormatUint(uint64(s.table), 10)); err != nil {
		return fmt.Errorf("call the other relays: %w", err)
	}
	return nil
}

// End notes that the relay ended in order and gives the locks up.
func (s *WorkingSession) End() error {
	defer s.Discard()
	if s.led && s.ordered() {
		if _, err := s.exec(sqlfiles.Session("end work")); err != nil {
			return fmt.Errorf("note the end: %w", err)
		}
	}
	return nil
}

// Discard closes the session, and with it ends its locks. Safe to call twice.
func (s *WorkingSession) Discard() {
	s.st.leading.Store(false)
	s.st.last.Store(0)
	if s.conn != nil {
		// Conn.Close would put the connection back into the pool, with our locks.
		_ = s.conn.Raw(func(any) error { return driver.ErrBadConn })
	}
	if s.db != nil {
		_ = s.db.Close()
	}
}

// uuidArray formats ids, which are UUIDs and so need no quoting, as an array.
func uuidArray(ids []string) string { return "{" + strings.Join(ids, ",") + "}" }

// intArray formats integers as an array.
func intArray[T int | int64](ns []T) string {
	b := []byte{'{'}
	for i, n := range ns {
		if i > 0 {
			b = append(b, ',')
		}
		b = strconv.AppendInt(b, int64(n), 10)
	}
	return string(append(b, '}'))
}
