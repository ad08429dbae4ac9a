package main

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

	"github.com/lib/pq"
	"github.com/lib/pq/pqerror"
)

// migrateSession is one connection of migrate. It is pinned, because the migrate lock and the
// settings belong to the session, and it is never repaired. Not safe for concurrent use, but for
// abort.
type migrateSession struct {
	*sql.Conn
	db        *sql.DB
	pid       int                              // of the server's process
	link      atomic.Pointer[boundedconn.Conn] // the connection, set by dialling
	connected atomic.Bool                      // what is dialled from now on is to cancel a statement only
}

// openMigrateSession connects. Errors never hold the password.
func openMigrateSession(ctx context.Context, cfg pq.Config) (*migrateSession, error) {
	connector, err := pq.NewConnectorConfig(cfg)
	if err != nil {
		return nil, migrateErrorf(errMigrateDSN, "DATABASE_URL: %s", scrubPQ(err))
	}
	s := &migrateSession{}
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
func (s *migrateSession) answerWithin(limit time.Duration) {
	if c := s.link.Load(); c != nil {
		_ = c.OwnReads(limit) // fails on a closed connection only, as the next read will
	}
}

// abort makes whatever runs on the session fail at once. Safe from any goroutine.
func (s *migrateSession) abort() {
	if c := s.link.Load(); c != nil {
		_ = c.Close()
	}
}

func (s *migrateSession) close() {
	_ = s.Conn.Close() // gives it back to the pool, whose only one it is
	_ = s.db.Close()
}

// Dial, DialTimeout and DialContext make the session its own pq.Dialer.
func (s *migrateSession) Dial(network, address string) (net.Conn, error) {
	return s.DialContext(context.Background(), network, address)
}

func (s *migrateSession) DialTimeout(network, address string, timeout time.Duration) (net.Conn, error) {
	ctx, cancel := context.WithTimeout(context.Background(), timeout)
	defer cancel()
	return s.DialContext(ctx, network, address)
}

func (s *migrateSession) DialContext(ctx context.Context, network, address string) (net.Conn, error) {
	d := boundedconn.Dialer{ConnectTimeout: connectTimeout, ReadTimeout: migrateAnswerTimeout, WriteTimeout: connectTimeout}
	c, err := d.DialContext(ctx, network, address)
	if err != nil {
		return nil, err
	}
	if !s.connected.Load() {
		s.link.Store(c.(*boundedconn.Conn))
	}
	return c, nil
}

// checkDirect returns errMigratePooler when the two sessions share server processes, which they
// do only behind a pooler in transaction mode: locks and settings of a session mean nothing there.
// Such a pooler has put the idle session's server process back into its pool, so a transaction
// of the other gets that very process, or else the idle session comes back on another.
func checkDirect(ctx context.Context, idle, other *migrateSession) error {
	const pidQuery = "SELECT pg_backend_pid()"
	for range 5 { // beside other clients of the pooler, one try may miss
		tx, err := other.BeginTx(ctx, nil)
		if errors.Is(err, driver.ErrBadConn) {
			return migrateErrorf(errMigratePooler, "the connection was closed at BEGIN, as a pooler in statement mode does: connect to the server itself")
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
			return errMigratePooler
		}
	}
	return nil
}

// migrateError is a failure in one line, with the sentinel of its kind.
type migrateError struct {
	kind error // one of the errMigrate... below
	text string
}

func (e *migrateError) Error() string { return e.text }
func (e *migrateError) Unwrap() error { return e.kind }

func migrateErrorf(kind error, format string, args ...any) error {
	return &migrateError{kind, fmt.Sprintf(format, args...)}
}

// What migrate can end with. To run it again helps with errMigrateLocked only, and with what is
// none of these: lost connections and the like.
var (
	// errMigrateDSN: the DSN is faulty. Its text is never pq's own, which quotes the DSN.
	errMigrateDSN = errors.New("DATABASE_URL is faulty")
	// errMigrateServer: PostgreSQL is too old.
	errMigrateServer = errors.New("server too old")
	// errMigrateReadOnly: a standby, or a database or role that is read-only by default.
	errMigrateReadOnly = errors.New("server is read-only")
	// errMigratePooler: between us and the server is a pooler in transaction mode.
	errMigratePooler = errors.New("this is a pooler in transaction mode, where session locks and settings mean nothing: connect to the server itself")
	// errMigrateRights: the role lacks a right.
	errMigrateRights = errors.New("no right")
	// errMigrateConflict: something of one of our names is there that is not ours.
	errMigrateConflict = errors.New("name taken by something else")
	// errMigrateLocked: others kept a lock for too long.
	errMigrateLocked = errors.New("lock not had in time")
)

// migrateErrorOf gives the server's errors the sentinel of their kind.
func migrateErrorOf(doing string, err error) error {
	kind := error(nil)
	var known *migrateError
	switch {
	case err == nil:
		return nil
	case errors.As(err, &known):
		return err
	case pq.As(err, pqerror.InsufficientPrivilege) != nil:
		kind = errMigrateRights
	case pq.As(err, pqerror.ReadOnlySQLTransaction) != nil:
		kind = errMigrateReadOnly
	case pq.As(err, pqerror.ProtocolViolation) != nil: // what pgbouncer answers to search_path and the like
		return migrateErrorf(errMigratePooler, "%s: %v (a pooler? connect to the server itself)", doing, err)
	}
	if kind == nil {
		return fmt.Errorf("%s: %w", doing, err)
	}
	return &migrateError{kind, fmt.Sprintf("%s: %v", doing, err)}
}
