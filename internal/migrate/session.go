package migrate

import (
	"context"
	"database/sql"
	"database/sql/driver"
	"errors"
	"fmt"
	"net"
	"sync/atomic"
	"time"

	"outbox-relay/internal/boundedconn"
	"outbox-relay/internal/serverurl"

	"github.com/lib/pq"
	"github.com/lib/pq/pqerror"
)

// session is one connection of migrate. It is pinned, because the migrate lock and the
// settings belong to the session, and it is never repaired. Not safe for concurrent use, but for
// abort.
type session struct {
	*sql.Conn
	db        *sql.DB
	pid       int                              // of the server's process
	link      atomic.Pointer[boundedconn.Conn] // the connection, set by dialling
	connected atomic.Bool                      // what is dialled from now on is to cancel a statement only
}

// openSession connects. Errors never hold the password.
func openSession(ctx context.Context, cfg pq.Config) (*session, error) {
	connector, err := pq.NewConnectorConfig(cfg)
	if err != nil {
		return nil, errorf(ErrDSN, "DATABASE_URL: %s", serverurl.ScrubPQ(err))
	}
	s := &session{}
	connector.Dialer(s)
	s.db = sql.OpenDB(connector)
	s.db.SetMaxOpenConns(1)
	if s.Conn, err = s.db.Conn(ctx); err != nil {
		_ = s.db.Close()
		return nil, err
	}
	s.connected.Store(true)
	if err := s.QueryRowContext(ctx, "SELECT pg_backend_pid()").Scan(&s.pid); err != nil {
		s.close()
		return nil, err
	}
	return s, nil
}

// answerWithin bounds every wait for the server from now on.
func (s *session) answerWithin(limit time.Duration) {
	if c := s.link.Load(); c != nil {
		_ = c.OwnReads(limit) // fails on a closed connection only, as the next read will
	}
}

// abort makes whatever runs on the session fail at once. Safe from any goroutine.
func (s *session) abort() {
	if c := s.link.Load(); c != nil {
		_ = c.Close()
	}
}

func (s *session) close() {
	_ = s.Conn.Close() // gives it back to the pool, whose only one it is
	_ = s.db.Close()
}

// Dial, DialTimeout and DialContext make the session its own pq.Dialer.
func (s *session) Dial(network, address string) (net.Conn, error) {
	return s.DialContext(context.Background(), network, address)
}

func (s *session) DialTimeout(network, address string, timeout time.Duration) (net.Conn, error) {
	ctx, cancel := context.WithTimeout(context.Background(), timeout)
	defer cancel()
	return s.DialContext(ctx, network, address)
}

func (s *session) DialContext(ctx context.Context, network, address string) (net.Conn, error) {
	d := boundedconn.Dialer{ConnectTimeout: connectTimeout, ReadTimeout: answerTimeout, WriteTimeout: connectTimeout}
	c, err := d.DialContext(ctx, network, address)
	if err != nil {
		return nil, err
	}
	if !s.connected.Load() {
		s.link.Store(c.(*boundedconn.Conn))
	}
	return c, nil
}

// checkDirect returns ErrPooler when the two sessions share server processes, which they
// do only behind a pooler in transaction mode: locks and settings of a session mean nothing there.
// Such a pooler has put the idle session's server process back into its pool, so a transaction
// of the other gets that very process, or else the idle session comes back on another.
func checkDirect(ctx context.Context, idle, other *session) error {
	const pidQuery = "SELECT pg_backend_pid()"
	for range 5 { // beside other clients of the pooler, one try may miss
		tx, err := other.BeginTx(ctx, nil)
		if errors.Is(err, driver.ErrBadConn) {
			return errorf(ErrPooler, "the connection was closed at BEGIN, as a pooler in statement mode does: connect to the server itself")
		}
		if err != nil {
			return err
		}
		var otherPID, idlePID int
		err = tx.QueryRowContext(ctx, pidQuery).Scan(&otherPID)
		if err == nil && otherPID != idle.pid {
			err = idle.QueryRowContext(ctx, pidQuery).Scan(&idlePID)
		}
		if err := errors.Join(err, tx.Rollback()); err != nil {
			return err
		}
		if idlePID != idle.pid {
			return ErrPooler
		}
	}
	return nil
}

// kindError is a failure in one line, with the sentinel of its kind.
type kindError struct {
	kind error // one of the errors below
	text string
}

func (e *kindError) Error() string { return e.text }
func (e *kindError) Unwrap() error { return e.kind }

func errorf(kind error, format string, args ...any) error {
	return &kindError{kind, fmt.Sprintf(format, args...)}
}

// What migrate can end with. To run it again helps with ErrLocked only, and with what is
// none of these: lost connections and the like.
var (
	// ErrDSN: the DSN is faulty. Its text is never pq's own, which quotes the DSN.
	ErrDSN = errors.New("DATABASE_URL is faulty")
	// ErrServer: PostgreSQL is too old.
	ErrServer = errors.New("server too old")
	// ErrReadOnly: a standby, or a database or role that is read-only by default.
	ErrReadOnly = errors.New("server is read-only")
	// ErrPooler: between us and the server is a pooler in transaction mode.
	ErrPooler = errors.New("this is a pooler in transaction mode, where session locks and settings mean nothing: connect to the server itself")
	// ErrRights: the role lacks a right.
	ErrRights = errors.New("no right")
	// ErrConflict: something of one of our names is there that is not ours.
	ErrConflict = errors.New("name taken by something else")
	// ErrLocked: others kept a lock for too long.
	ErrLocked = errors.New("lock not had in time")
)

// errorOf gives the server's errors the sentinel of their kind.
func errorOf(doing string, err error) error {
	kind := error(nil)
	var known *kindError
	switch {
	case err == nil:
		return nil
	case errors.As(err, &known):
		return err
	case pq.As(err, pqerror.InsufficientPrivilege) != nil:
		kind = ErrRights
	case pq.As(err, pqerror.ReadOnlySQLTransaction) != nil:
		kind = ErrReadOnly
	case pq.As(err, pqerror.ProtocolViolation) != nil: // what pgbouncer answers to search_path and the like
		return errorf(ErrPooler, "%s: %v (a pooler? connect to the server itself)", doing, err)
	}
	if kind == nil {
		return fmt.Errorf("%s: %w", doing, err)
	}
	return &kindError{kind, fmt.Sprintf("%s: %v", doing, err)}
}
