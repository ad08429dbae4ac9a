// Package migrate creates the outbox in a database, or brings an older one up to date in place, beside any
// traffic. What it makes is sql/schema.sql.
package migrate

import (
	"context"
	"fmt"
	"io"
	"strings"
	"time"

	"github.com/lib/pq"
	"github.com/lib/pq/pqerror"

	"outbox-relay/internal/serverurl"
	sqlfiles "outbox-relay/sql"
)

const (
	// answerTimeout bounds each wait for the server. The statement_timeout in section
	// "bounded" of migrate.sql is shorter: it comes first and says more.
	answerTimeout = 45 * time.Second
	// connectTimeout bounds dialling and each write.
	connectTimeout = 5 * time.Second
	// forever is for the wait for an index, of which the server says nothing until it is done; the
	// watcher then finds out whether it is still there.
	forever   = 10 * 365 * 24 * time.Hour
	minServer = 140000 // CREATE OR REPLACE TRIGGER; what lib/pq supports
)

// limits says how patient migrate is. Tests shrink it.
type limits struct {
	lockTries int           // how often a lock is tried for, 2 s each time
	lockPause time.Duration // between the tries, times their number
	turn      time.Duration // wait for another migrate to end; that may be building indexes
	watch     time.Duration // between the lines that tell of an index's progress
}

var defaultLimits = limits{lockTries: 5, lockPause: time.Second, turn: 15 * time.Minute, watch: 5 * time.Second}

// Run creates the outbox in the database at dsn, or brings an older one up to date in
// place, and writes what it did to w, line by line. It may be run again at any time, by several
// processes at once, and beside any traffic; what a run that was cut off left undone, the next
// one does. Errors are one line without any password, and wrap one of the errors of this package
// where the cause is one of those.
func Run(ctx context.Context, dsn string, w io.Writer) error {
	return migrate(ctx, dsn, w, defaultLimits)
}

func migrate(ctx context.Context, dsn string, w io.Writer, limits limits) error {
	dsn, faults := serverurl.PrepareDSN(dsn)
	if len(faults) > 0 {
		return errorf(ErrDSN, "DATABASE_URL: %s", strings.Join(faults, "; "))
	}
	cfg, err := pq.NewConfig(dsn)
	if err != nil {
		return errorf(ErrDSN, "DATABASE_URL: %s", serverurl.ScrubPQ(err))
	}
	if cfg.ApplicationName == serverurl.ApplicationName { // not one of the user's
		cfg.ApplicationName += " migrate"
	}

	m := &migration{out: w, limits: limits}
	if m.session, err = openSession(ctx, cfg); err != nil {
		return errorOf("connect", err)
	}
	defer m.session.close()
	// The second session watches the first. A role may be allowed no more than one.
	m.watcher, err = openSession(ctx, cfg)
	switch {
	case err == nil:
		defer m.watcher.close()
	case pq.As(err, pqerror.TooManyConnections) == nil:
		return errorOf("connect", err)
	}
	return m.run(ctx)
}

// migration is one run of migrate.
type migration struct {
	out     io.Writer
	limits  limits
	session *session
	watcher *session // nil when the server allows no second session

	server serverFacts
	acted  bool // something was changed
}

// serverFacts is what the session is connected to.
type serverFacts struct {
	versionNum                            int
	version, database, schema, user, path string
	readOnly, canCreate                   bool
	schemaOID                             uint32
}

// did prints a line about a change, say about anything else.
func (m *migration) did(format string, args ...any) {
	m.acted = true
	m.say(format, args...)
}

func (m *migration) say(format string, args ...any) { fmt.Fprintf(m.out, format+"\n", args...) }

func (m *migration) run(ctx context.Context) error {
	if m.watcher != nil {
		if err := checkDirect(ctx, m.session, m.watcher); err != nil {
			return errorOf("check the connection", err)
		}
	}
	if err := m.checkServer(ctx); err != nil {
		return errorOf("check the server", err)
	}
	m.say("database %q, schema %q, PostgreSQL %s", m.server.database, m.server.schema, m.server.version)
	if _, err := m.session.ExecContext(ctx, sqlfiles.MigrateSection("bounded")); err != nil {
		return errorOf("set limits", err)
	}
	if err := m.takeTurn(ctx); err != nil {
		return errorOf("wait for another migrate", err)
	}

	facts, err := inspectOutbox(ctx, m.session, m.server.schema)
	if err != nil {
		return errorOf("inspect", err)
	}
	if err := facts.conflict(m.server.schema, m.server.path); err != nil {
		return err
	}
	if err := m.apply(ctx, facts); err != nil {
		return err
	}
	// Read again: apply may have made the table.
	if facts, err = inspectOutbox(ctx, m.session, m.server.schema); err != nil {
		return errorOf("inspect", err)
	}
	if err := m.buildIndexes(ctx, facts); err != nil {
		return err
	}
	if facts.deadUnmarked() {
		if err := m.markDead(ctx, facts); err != nil {
			return err
		}
	}
	m.note(facts)
	if m.acted {
		m.say("schema is up to date")
	} else {
		m.say("nothing to do: schema is up to date")
	}
	return nil
}

func (m *migration) checkServer(ctx context.Context) error {
	s := &m.server
	err := m.session.QueryRowContext(ctx, sqlfiles.MigrateSection("server")).Scan(&s.versionNum, &s.version,
		&s.readOnly, &s.database, &s.schema, &s.user, &s.path, &s.schemaOID, &s.canCreate)
	if err != nil {
		return err
	}
	return s.fault()
}

// fault returns why nothing can be migrated here, or nil.
func (s *serverFacts) fault() error {
	switch {
	case s.versionNum < minServer:
		return errorf(ErrServer, "PostgreSQL %s is too old: 14 or later is needed", s.version)
	case s.readOnly:
		return errorf(ErrReadOnly, "database %q is read-only here: a standby, or default_transaction_read_only is on", s.database)
	case s.schema == "":
		return errorf(ErrConflict, "search_path %s names no schema that exists and that user %q may use: create it first", s.path, s.user)
	}
	return nil
}

// takeTurn returns when no other migrate works on the schema. It tries for the lock instead of
// waiting for it: a waiting statement would hold a snapshot, and the other's CREATE INDEX
// CONCURRENTLY would wait for that in turn. The lock ends with the session.
func (m *migration) takeTurn(ctx context.Context) error {
	class, key := sqlfiles.MigrateLockClass, sqlfiles.LockKey(m.server.schemaOID)
	end := time.Now().Add(m.limits.turn)
	for try := 1; ; try++ {
		var got bool
		err := m.session.QueryRowContext(ctx, "SELECT pg_try_advisory_lock($1, $2)", class, key).Scan(&got)
		if err != nil || got {
			return err
		}
		holder := m.holder(ctx, "migrate lock holder", class, key)
		if time.Now().After(end) {
			return errorf(ErrLocked, "another migrate has been at work for more than %v: %s", m.limits.turn, holder)
		}
		if try == 3 { // a session that has just ended may keep it for a moment
			m.say("another migrate is at work, waiting for it: %s", holder)
		}
		if err := pause(ctx, 300*time.Millisecond); err != nil {
			return err
		}
	}
}

// holder says who holds a lock, by a query of migrate.sql.
func (m *migration) holder(ctx context.Context, section string, args ...any) string {
	var (
		p                  int
		user, app, started string
	)
	err := m.session.QueryRowContext(ctx, sqlfiles.MigrateSection(section), args...).Scan(&p, &user, &app, &started)
	if err != nil {
		return "its holder is no longer there"
	}
	return processLine(p, user, app, started)
}

// processLine names a session of the server as a person can find it. Without the rights of
// pg_read_all_stats the start of its query is unknown.
func processLine(pid int, user, app, queryStart string) string {
	if pid == 0 {
		return "a prepared transaction, see pg_prepared_xacts"
	}
	if queryStart == "" {
		queryStart = "unknown"
	}
	return fmt.Sprintf("pid %d, user %q, application_name %q, query started %s", pid, user, app, queryStart)
}

// whileLocked runs f, again when it had to give up on a lock, and in the end says whose lock it was.
func (m *migration) whileLocked(ctx context.Context, table uint32, f func() error) error {
	for try := 1; ; try++ {
		err := f()
		if pq.As(err, pqerror.LockNotAvailable, pqerror.TRDeadlockDetected) == nil {
			return err
		}
		holder := m.holder(ctx, "lock holders", table)
		if try >= m.limits.lockTries {
			return errorf(ErrLocked, "lock on outbox_events not had in %d tries, others keep it: %s", try, holder)
		}
		m.say("lock on outbox_events not had, trying again: %s", holder)
		if err := pause(ctx, time.Duration(try)*m.limits.lockPause); err != nil {
			return err
		}
	}
}

// note tells of what is legal and yet rarely meant.
func (m *migration) note(f *outboxFacts) {
	for _, t := range f.triggers {
		if t.current && t.disabled {
			m.say("note: trigger %s is disabled, so the relay finds events by its fallback poll only", t.name)
		}
	}
	if f.events.persistence == "u" {
		m.say("note: outbox_events is UNLOGGED, so a crash of the server loses events")
	}
	if f.events.rowSecurity {
		m.say("note: outbox_events has row security; the relay publishes only the rows its role may see")
	}
}

func pause(ctx context.Context, d time.Duration) error {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-ctx.Done():
		return ctx.Err()
	case <-t.C:
		return nil
	}
}
