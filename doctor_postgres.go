package main

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/lib/pq"

	"outbox-relay/internal/boundedconn"
	sqlfiles "outbox-relay/sql"
)

const (
	// maxClockGap is how far clocks may be apart before delays that are measured mislead.
	maxClockGap = 2 * time.Second
	// fewConnections is how many sessions a relay and a standby need, with one command beside them.
	fewConnections = 10
	// A snapshot older than oldTransaction, or a slot oldSlot transactions behind, keeps dead rows.
	oldTransaction = 5 * time.Minute
	oldSlot        = 100_000
	// manyDead dead rows, and more than the living, are more than autovacuum leaves behind.
	manyDead = 100_000
	// bloatedIndex is the size of outbox_events_fresh that so few pending events do not explain.
	bloatedIndex = 256 << 20
	fewPending   = 10_000
	// lateEvent is the age of a pending event that wants an explanation, and longWriter how long a
	// silent writer may keep the relay awake.
	lateEvent  = time.Minute
	longWriter = 10 * time.Second
	// listenWait is how long a notification may take.
	listenWait = 5 * time.Second
)

const mendMigrate = "outbox-relay migrate (as the owner of the table)"

// mendRights is how a role gets the rights of one of the groups in sql/roles.sql.
func mendRights(group, role string) string {
	return fmt.Sprintf(`psql -1 -f sql/roles.sql -c 'GRANT %s TO %s'`, group, pq.QuoteIdentifier(role))
}

// checkPostgres checks the server, the outbox in it, and who works there.
func (d *doctor) checkPostgres(ctx context.Context) {
	o, err := connectOperator(ctx, d.cfg, "doctor")
	if err != nil {
		d.fault("postgres", "start the server, or correct DATABASE_URL", "%v", err)
		return
	}
	defer o.Close()
	canSeeAll := d.checkServer(ctx, o)
	d.checkListen(ctx, o)
	current, ours := d.checkSchema(ctx)
	if !ours { // nothing else means anything then
		return
	}
	if err := o.find(ctx); err != nil {
		if current { // otherwise it has been told
			d.fault("schema", mendMigrate, "%v", err)
		}
		return
	}
	d.checkRights(ctx, o)
	d.checkSession(ctx)
	d.checkTable(ctx, o)
	d.checkHorizon(ctx, o, canSeeAll)
	d.checkState(ctx, o)
}

func (d *doctor) checkServer(ctx context.Context, o *operator) (canSeeAll bool) {
	var version string
	var clock int64
	var counts, autovacuum bool
	var free, roleLimit int
	sent := time.Now()
	err := o.QueryRowContext(ctx, sqlfiles.Doctor("server")).
		Scan(&version, &clock, &counts, &autovacuum, &free, &roleLimit, &canSeeAll)
	if err != nil {
		d.failed("postgres", err)
		return false
	}
	d.ok("postgres", "PostgreSQL %s", version)
	if gap := time.UnixMicro(clock).Sub(sent.Add(time.Since(sent) / 2)); gap.Abs() > maxClockGap {
		d.warning("clock", "synchronize the clocks (NTP)",
			"the clock of the database is %v from the one here: delays in metrics mislead; retries go by the database's", gap.Round(time.Millisecond))
	} else {
		d.ok("clock", "that of the database is %v from the one here", gap.Round(time.Millisecond))
	}
	if !counts || !autovacuum {
		d.fault("autovacuum", `psql -c "ALTER SYSTEM SET autovacuum = on" -c "ALTER SYSTEM SET track_counts = on" -c "SELECT pg_reload_conf()"`,
			"autovacuum is off on this server: dead rows pile up, and claims get slower and slower")
	} else {
		d.ok("autovacuum", "is on")
	}
	switch {
	case roleLimit > 0 && roleLimit < fewConnections:
		d.warning("connections", fmt.Sprintf("ALTER ROLE ... CONNECTION LIMIT %d", fewConnections),
			"the role may have %s: a relay takes 3 to 5, and so does each standby", counted(roleLimit, "connection"))
	case free < fewConnections:
		d.warning("connections", "raise max_connections, or have others close theirs", "the server has %s left", counted(free, "connection"))
	default:
		d.ok("connections", "the server has %s left", counted(free, "connection"))
	}
	return canSeeAll
}

// checkListen makes a listener and notifies it, as the relay does.
func (d *doctor) checkListen(ctx context.Context, o *operator) {
	dsn, err := d.cfg.databaseDSN()
	if err != nil {
		d.failed("listen", err)
		return
	}
	failed := make(chan error, 1)
	dialer := boundedconn.Dialer{ConnectTimeout: connectTimeout, ReadTimeout: answerTimeout, WriteTimeout: connectTimeout}
	l := pq.NewDialListener(dialer, dsn, time.Second, time.Second, func(event pq.ListenerEventType, err error) {
		if event == pq.ListenerEventConnectionAttemptFailed {
			select {
			case failed <- err:
			default:
			}
		}
	})
	defer func() {
		go func() { _ = l.Close() }() // which may wait for a dial; the process ends soon
	}()
	const channel = "outbox_doctor"
	began := time.Now()
	listening := make(chan error, 1)
	go func() { listening <- l.Listen(channel) }()
	timeout := time.After(listenWait)
	for {
		select {
		case err := <-listening:
			if err == nil {
				_, err = o.ExecContext(ctx, sqlfiles.Doctor("notify"), channel)
			}
			if err != nil {
				d.failed("listen", err)
				return
			}
		case err := <-failed:
			d.fault("listen", "allow the role another connection", "LISTEN: %v", err)
			return
		case n := <-l.Notify:
			if n != nil {
				d.ok("listen", "a notification came back after %v", time.Since(began).Round(time.Millisecond))
				return
			}
		case <-timeout:
			d.fault("listen", "name the server itself in DATABASE_URL, not a pooler",
				"a notification did not come back within %v: events wait for the fallback poll (FALLBACK_INTERVAL, %v)", listenWait, d.cfg.FallbackInterval)
			return
		}
	}
}

// checkRights looks for rights that the role of DATABASE_URL lacks.
func (d *doctor) checkRights(ctx context.Context, o *operator) {
	var missing []string
	rows, err := o.QueryContext(ctx, sqlfiles.Doctor("missing rights"))
	if err != nil {
		d.failed("rights", err)
		return
	}
	defer rows.Close()
	for rows.Next() {
		var right string
		if err := rows.Scan(&right); err != nil {
			d.failed("rights", err)
			return
		}
		missing = append(missing, right)
	}
	switch err := rows.Err(); {
	case err != nil:
		d.failed("rights", err)
	case len(missing) > 0:
		d.fault("rights", mendRights("outbox_relay", o.user), "role %s lacks %s", o.user, strings.Join(missing, "; "))
	default:
		d.checkPower(ctx, o)
	}
	d.checkApplications(ctx, o)
}

// checkPower says so when the role of DATABASE_URL may do more than a relay needs.
func (d *doctor) checkPower(ctx context.Context, o *operator) {
	var super, owner bool
	err := o.QueryRowContext(ctx, sqlfiles.Doctor("power"), int64(o.table)).Scan(&super, &owner)
	mend := "a login for the relay alone: CREATE ROLE relay LOGIN, and " + mendRights("outbox_relay", "relay")
	switch {
	case err != nil:
		d.failed("rights", err)
	case super:
		d.warning("rights", mend, "role %s is a superuser: all works, and whoever gets at its password has the whole server", o.user)
	case owner:
		d.warning("rights", mend, "role %s may act as the owner of outbox_events: all works, and the relay could also change or drop the table", o.user)
	default:
		d.ok("rights", "role %s has what the relay needs", o.user)
	}
}

// checkApplications looks for logins of applications that may do more than insert events.
func (d *doctor) checkApplications(ctx context.Context, o *operator) {
	rows, err := o.QueryContext(ctx, sqlfiles.Doctor("application rights"), int64(o.table))
	if err != nil {
		d.failed("rights", err)
		return
	}
	defer rows.Close()
	for rows.Next() {
		var role, more string
		if err := rows.Scan(&role, &more); err != nil {
			d.failed("rights", err)
			return
		}
		d.warning("rights", "REVOKE that, and "+mendRights("outbox_app", role),
			"role %s may INSERT into outbox_events, as an application does, and also %s", role, more)
	}
	if err := rows.Err(); err != nil {
		d.failed("rights", err)
	}
}

// checkSession opens a working session as the relay does, takes no lock with it, and looks at the plan
// of the claim.
func (d *doctor) checkSession(ctx context.Context) {
	s, err := NewStore(d.cfg).Open(ctx)
	if err != nil {
		mend := "see the message"
		if errors.Is(err, errPooler) {
			mend = "name the server itself in DATABASE_URL"
		}
		d.fault("session", mend, "the relay could not work: %v", err)
		return
	}
	defer s.Discard()
	d.ok("session", "the relay's working session opens, and is its own: there is no transaction pooler in the way")
	args := []any{-1, d.cfg.BatchSize, d.cfg.BatchBytes, d.cfg.AMQPMaxMessageBytes, "{}"}
	if s.ordered() {
		args = append(args, d.cfg.OnDeadLetter == onDeadLetterHold)
	}
	plan, err := queryText(ctx, s.conn, "EXPLAIN (COSTS OFF) "+sqlfiles.Claim(s.ordered(), false, s.payloadType), args...)
	switch {
	case err != nil:
		d.failed("claim", err)
	case !strings.Contains(plan, "outbox_events_fresh") || strings.Contains(plan, "Seq Scan on outbox_events"):
		d.fault("claim", mendMigrate, "claims do not use the index outbox_events_fresh and read the whole table")
	default:
		d.ok("claim", "claims use the indexes")
	}
}

// queryText returns the first column of all rows.
func queryText(ctx context.Context, q rowQuerier, query string, args ...any) (string, error) {
	rows, err := q.QueryContext(ctx, query, args...)
	if err != nil {
		return "", err
	}
	defer rows.Close()
	var b strings.Builder
	for rows.Next() {
		var line string
		if err := rows.Scan(&line); err != nil {
			return "", err
		}
		b.WriteString(line + "\n")
	}
	return b.String(), rows.Err()
}

// checkTable looks at the trigger, the numbering, and what vacuum left.
func (d *doctor) checkTable(ctx context.Context, o *operator) {
	var live, dead, tableBytes, indexBytes, cache int64
	var vacuumed *time.Time
	var off, replicated bool
	var trigger string
	err := o.QueryRowContext(ctx, sqlfiles.Doctor("table"), int64(o.table)).
		Scan(&live, &dead, &vacuumed, &tableBytes, &indexBytes, &off, &trigger, &replicated, &cache)
	if err != nil {
		d.failed("vacuum", err)
		return
	}
	const table = "ALTER TABLE outbox_events "
	switch trigger {
	case "": // a matter of the schema
	case "D":
		d.fault("trigger", table+"ENABLE TRIGGER outbox_notify",
			"trigger outbox_notify is disabled: events wait for the fallback poll (FALLBACK_INTERVAL, %v)", d.cfg.FallbackInterval)
	case "R":
		d.fault("trigger", table+"ENABLE ALWAYS TRIGGER outbox_notify",
			"trigger outbox_notify fires for replicated rows only: events of applications wait for the fallback poll")
	case "O":
		if replicated {
			d.warning("trigger", table+"ENABLE ALWAYS TRIGGER outbox_notify",
				"outbox_events is filled by a subscription, for whose rows trigger outbox_notify does not fire: they wait for the fallback poll")
			break
		}
		fallthrough
	default:
		d.ok("trigger", "outbox_notify is enabled")
	}
	if cache > 1 {
		d.fault("seq", table+"ALTER seq SET CACHE 1",
			"the sequence behind seq has a cache of %d: sessions number events from blocks of their own, and the order is lost", cache)
	} else {
		d.ok("seq", "the sequence behind seq has no cache: events are numbered in the order of their insertion")
	}
	when := "never"
	if vacuumed != nil {
		when = clock(*vacuumed)
	}
	switch {
	case off:
		d.fault("vacuum", table+"RESET (autovacuum_enabled)", "autovacuum is switched off for outbox_events")
	case dead > manyDead && dead > live:
		d.warning("vacuum", "VACUUM outbox_events, and see what holds it back",
			"outbox_events has %s beside %d living; last vacuum: %s", counted(dead, "dead row"), live, when)
	default:
		d.ok("vacuum", "%d MB, %s beside %d living, last vacuum: %s", tableBytes>>20, counted(dead, "dead row"), live, when)
	}
	if indexBytes > bloatedIndex {
		var s Status
		if err := s.readBacklog(ctx, o); err == nil && s.Pending.N < fewPending {
			d.warning("bloat", "REINDEX INDEX CONCURRENTLY outbox_events_fresh",
				"index outbox_events_fresh has %d MB for %s", indexBytes>>20, s.Pending.of("pending event"))
			return
		}
	}
	d.ok("bloat", "index outbox_events_fresh has %d MB", indexBytes>>20)
}

// checkHorizon looks for what keeps vacuum from removing dead rows.
func (d *doctor) checkHorizon(ctx context.Context, o *operator, canSeeAll bool) {
	before := len(d.findings)
	look := func(section string, limit any, scan func(*sql.Rows) error) {
		rows, err := o.QueryContext(ctx, sqlfiles.Doctor(section), limit)
		if err != nil {
			d.failed("snapshots", err)
			return
		}
		defer rows.Close()
		for rows.Next() {
			if err := scan(rows); err != nil {
				d.failed("snapshots", err)
				return
			}
		}
		if err := rows.Err(); err != nil {
			d.failed("snapshots", err)
		}
	}
	var who, mend string
	look("old transactions", oldTransaction.Seconds(), func(rows *sql.Rows) error {
		var seconds float64
		err := rows.Scan(&who, &seconds, &mend)
		if err == nil {
			d.warning("snapshots", mend, "%s: open%s; vacuum cannot remove what was settled since", who, age(" for %s", &seconds))
		}
		return err
	})
	look("old slots", oldSlot, func(rows *sql.Rows) error {
		var behind int64
		err := rows.Scan(&who, &behind, &mend)
		if err == nil {
			d.warning("snapshots", mend, "%s is %s behind: vacuum cannot remove what was settled since", who, counted(behind, "transaction"))
		}
		return err
	})
	switch {
	case len(d.findings) > before:
	case !canSeeAll:
		d.unknown("snapshots", fmt.Sprintf(`psql -c 'GRANT pg_read_all_stats TO %s'`, pq.QuoteIdentifier(o.user)),
			"no old prepared transaction or replication slot; sessions of other roles are not for a relay to see, unless it is granted pg_read_all_stats")
	default:
		d.ok("snapshots", "nothing old holds vacuum back")
	}
}
