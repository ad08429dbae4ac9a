package migrate

import (
	"context"
	"database/sql"
	"fmt"
	"strings"
	"time"

	"github.com/lib/pq"
	"github.com/lib/pq/pqerror"

	sqlfiles "outbox-relay/sql"
)

// step is a change that takes no time, whatever the size of the table.
type step struct {
	doing string // for errors
	did   string // the line that is printed once it is committed
	sql   string
	do    func(context.Context, *sql.Tx) error // instead of sql
}

// apply brings all but the indexes of an existing table up to date, in one transaction.
func (m *migration) apply(ctx context.Context, f *outboxFacts) error {
	steps := plan(f)
	if len(steps) == 0 && len(missingIndexes(f)) == 0 {
		return nil
	}
	switch {
	case f.events.exists() && !f.events.owned:
		return errorf(ErrRights, "user %q may not alter outbox_events, its owner is %q", m.server.user, f.events.owner)
	case !m.server.canCreate:
		return errorf(ErrRights, "user %q may not create anything in schema %q: GRANT CREATE ON SCHEMA first", m.server.user, m.server.schema)
	case len(steps) == 0:
		return nil
	}
	err := m.whileLocked(ctx, f.events.oid, func() error {
		tx, err := m.session.BeginTx(ctx, nil)
		if err != nil {
			return err
		}
		defer func() { _ = tx.Rollback() }()
		for i, step := range steps {
			if step.do != nil {
				err = step.do(ctx, tx)
			} else {
				_, err = tx.ExecContext(ctx, step.sql)
			}
			if err != nil {
				return fmt.Errorf("%s: %w", steps[i].doing, err)
			}
		}
		return tx.Commit()
	})
	if err != nil {
		return errorOf("migrate", err)
	}
	for _, step := range steps {
		if step.did != "" {
			m.did("%s", step.did)
		}
	}
	return nil
}

// plan returns the steps that are missing, in their order.
func plan(f *outboxFacts) (steps []step) {
	add := func(doing, did, text string) { steps = append(steps, step{doing: doing, did: did, sql: text}) }

	if !f.events.exists() {
		add("create table outbox_events", "created table outbox_events", sqlfiles.SchemaSection("events"))
		for _, index := range sqlfiles.Indexes() {
			add("create index "+index.Name, "created index "+index.Name, index.Create)
		}
	} else {
		steps = append(steps, planColumns(&f.events)...)
	}

	for _, t := range f.triggers {
		if t.olderPerRow {
			add("drop trigger "+t.name,
				fmt.Sprintf("dropped trigger %s, which notified once a row; its function %s is left as it is. A relay of the older form that still runs finds events by its poll only", t.name, t.function),
				"DROP TRIGGER "+pq.QuoteIdentifier(t.name)+" ON outbox_events")
		}
	}
	if f.function != sqlfiles.TriggerFunction() || !f.hasTrigger() {
		did := "created function and trigger outbox_notify"
		if f.function != "" && f.hasTrigger() {
			did = "replaced function outbox_notify"
		}
		add("create trigger outbox_notify", did, sqlfiles.SchemaSection("doorbell"))
	}
	if options := missingOptions(f.events.options); options != "" {
		did := "set " + options + " on outbox_events"
		if !f.events.exists() {
			did = ""
		}
		add("set autovacuum options", did, "ALTER TABLE outbox_events SET ("+options+")")
	}
	if !f.viewIsCurrent() {
		steps = append(steps, step{doing: "create view outbox_dead_letters", did: "created view outbox_dead_letters", do: replaceView})
	}
	if !f.state.exists() || !f.suspects.exists() || !f.stateRow {
		add("create the relay's tables", "created tables outbox_relay_state and outbox_suspects", sqlfiles.SchemaSection("state"))
	}
	if f.events.exists() && len(steps) > 0 {
		lock := step{doing: "lock outbox_events", sql: sqlfiles.MigrateSection("lock table")}
		steps = append([]step{lock}, steps...)
	}
	return steps
}

// planColumns adds the columns and defaults that a table lacks.
func planColumns(t *tableFacts) (steps []step) {
	for _, w := range eventColumns {
		c, ok := t.column(w.name)
		switch {
		case !ok:
			steps = append(steps, step{
				doing: "add column " + w.name,
				did:   "added column " + w.name,
				sql:   sqlfiles.MigrateSection("add " + w.name),
			})
		case w.setDefault && !c.hasDefault:
			steps = append(steps, step{
				doing: "set default of column " + w.name,
				did:   "set the missing default of column " + w.name,
				sql:   sqlfiles.MigrateSection("default " + w.name),
			})
		}
	}
	return steps
}

func (f *outboxFacts) hasTrigger() bool {
	for _, t := range f.triggers {
		if t.current {
			return true
		}
	}
	return false
}

// viewIsCurrent tells the view on dead_at from the older one on attempts, by what the server says
// of it: it rewrites definitions.
func (f *outboxFacts) viewIsCurrent() bool {
	if len(f.view.columns) != len(eventColumns) {
		return false
	}
	for i, w := range eventColumns {
		if f.view.columns[i].name != w.name {
			return false
		}
	}
	return strings.Contains(f.definition, "dead_at IS NOT NULL") && !strings.Contains(f.definition, "attempts >")
}

// replaceView creates the view. A view that has other columns in the way is dropped, which loses
// the rights granted on it; where something depends on it, that fails.
func replaceView(ctx context.Context, tx *sql.Tx) error {
	if _, err := tx.ExecContext(ctx, "SAVEPOINT view"); err != nil {
		return err
	}
	_, err := tx.ExecContext(ctx, sqlfiles.SchemaSection("dead letters"))
	if pq.As(err, pqerror.InvalidTableDefinition) == nil {
		return err
	}
	if _, err := tx.ExecContext(ctx, "ROLLBACK TO SAVEPOINT view; DROP VIEW outbox_dead_letters"); err != nil {
		return err
	}
	_, err = tx.ExecContext(ctx, sqlfiles.SchemaSection("dead letters"))
	return err
}

// missingOptions returns those of schema.sql's autovacuum settings that a table has no value for,
// separated by commas. Values that somebody chose are left.
func missingOptions(set string) string {
	_, wanted, _ := strings.Cut(sqlfiles.SchemaSection("autovacuum"), "SET (")
	wanted, _, _ = strings.Cut(wanted, ")")
	var missing []string
	for _, option := range strings.Split(wanted, ",") {
		option = strings.TrimSpace(option)
		name, _, _ := strings.Cut(option, " ")
		if !strings.Contains(","+set, ","+name+"=") {
			missing = append(missing, option)
		}
	}
	return strings.Join(missing, ", ")
}

// missingIndexes returns what is to be built: indexes that are not there, invalid because their
// build was cut off, or of an earlier definition.
func missingIndexes(f *outboxFacts) (missing []sqlfiles.Index) {
	for _, want := range sqlfiles.Indexes() {
		if have, ok := f.index(want.Name); !ok || !have.valid || !sameIndex(have.definition, want.Create) {
			missing = append(missing, want)
		}
	}
	return missing
}

// olderIndex is what the older form polled by. It goes when what replaces it is there.
const olderIndex = "idx_outbox_unprocessed"

// buildIndexes builds the missing ones beside the traffic, one after the other.
func (m *migration) buildIndexes(ctx context.Context, f *outboxFacts) error {
	if !f.events.exists() {
		return nil
	}
	for _, index := range missingIndexes(f) {
		if have, ok := f.index(index.Name); ok {
			why := "whose build was cut off"
			if have.valid {
				why = "of another definition"
			}
			if err := m.longStatement(ctx, "dropping index "+index.Name, "DROP INDEX CONCURRENTLY "+index.Name); err != nil {
				return err
			}
			m.did("dropped index %s, %s", index.Name, why)
		}
		start := time.Now()
		create := strings.Replace(index.Create, "CREATE INDEX", "CREATE INDEX CONCURRENTLY", 1)
		err := m.longStatement(ctx, "building index "+index.Name, create)
		if pq.As(err, pqerror.DuplicateTable) != nil {
			return errorf(ErrConflict, "index %s cannot be built, something else has its name", index.Name)
		}
		if err != nil {
			return err
		}
		m.did("built index %s in %v", index.Name, time.Since(start).Round(time.Millisecond))
	}
	if _, ok := f.index(olderIndex); ok && f.events.owned {
		if err := m.longStatement(ctx, "dropping index "+olderIndex, "DROP INDEX CONCURRENTLY "+olderIndex); err != nil {
			return err
		}
		m.did("dropped index %s, which nothing uses any more", olderIndex)
	}
	return nil
}

// longStatement runs what may take any time, while the other session tells how far it is and makes
// sure that the server is still there.
func (m *migration) longStatement(ctx context.Context, doing, statement string) error {
	if _, err := m.session.ExecContext(ctx, sqlfiles.MigrateSection("unbounded")); err != nil {
		return errorOf(doing, err)
	}
	m.session.answerWithin(forever)
	// pq asks the server to cancel, and then waits for its answer all the same.
	defer context.AfterFunc(ctx, func() { m.session.answerWithin(answerTimeout) })()

	watched := make(chan error, 1) // what the watcher ends with
	watchCtx, stop := context.WithCancel(ctx)
	go func() { watched <- m.watch(watchCtx, doing) }()
	_, err := m.session.ExecContext(ctx, statement)
	stop()
	if watchErr := <-watched; err != nil && watchErr != nil {
		err = watchErr
	}
	if err != nil {
		return errorOf(doing, err)
	}

	m.session.answerWithin(answerTimeout)
	_, err = m.session.ExecContext(ctx, sqlfiles.MigrateSection("bounded"))
	return errorOf(doing, err)
}

// watch prints what the session is doing, when that changes, until the context is done. When the
// server no longer answers it aborts the session and returns why.
func (m *migration) watch(ctx context.Context, doing string) error {
	if m.watcher == nil {
		return nil
	}
	last := ""
	for pause(ctx, m.limits.watch) == nil {
		var (
			phase              string
			percent, pid       int
			user, app, started string
		)
		// Not under ctx: a question that is interrupted costs the session.
		err := m.watcher.QueryRowContext(context.WithoutCancel(ctx), sqlfiles.MigrateSection("index progress"), m.session.pid).
			Scan(&phase, &percent, &pid, &user, &app, &started)
		if ctx.Err() != nil {
			return nil
		}
		if err != nil {
			m.session.abort()
			return fmt.Errorf("the server does not answer: %w", err)
		}
		line := doing
		if phase != "" {
			line += ": " + phase
		}
		if percent > 0 {
			line += fmt.Sprintf(", %d %%", percent)
		}
		if pid != 0 {
			line += "; waits for a transaction to end: " + processLine(pid, user, app, started)
		}
		if line != last {
			m.say("%s", line)
			last = line
		}
	}
	return nil
}

// markDead gives the older form's dead letters, which it told by their attempts, a dead_at. Only
// an upgrade comes here, and only until it is through with it: afterwards the number of attempts
// alone says nothing.
func (m *migration) markDead(ctx context.Context, f *outboxFacts) error {
	var marked int64
	from := deadPortion{createdAt: "-infinity", id: "00000000-0000-0000-0000-000000000000"}
	for {
		portion, err := m.deadPortion(ctx, from)
		if err != nil {
			return errorOf("look for dead letters", err)
		}
		if portion.id == "" {
			break
		}
		err = m.whileLocked(ctx, f.events.oid, func() error {
			res, err := m.session.ExecContext(ctx, sqlfiles.MigrateSection("mark dead"), pq.Array(portion.dead))
			if err != nil {
				return err
			}
			n, err := res.RowsAffected()
			marked += n
			return err
		})
		if err != nil {
			return errorOf("mark dead letters", err)
		}
		from = portion
	}
	err := m.whileLocked(ctx, f.events.oid, func() error {
		_, err := m.session.ExecContext(ctx, sqlfiles.MigrateSection("marked"))
		return err
	})
	if err != nil {
		return errorOf("mark dead letters", err)
	}
	events := "events"
	if marked == 1 {
		events = "event"
	}
	m.did("marked %d %s with 5 or more failed attempts as dead letters", marked, events)
	return nil
}

// deadPortion is a stretch of the older form's pending rows, in the order of created_at and id.
type deadPortion struct {
	createdAt, id string   // of the last row; empty when there are no more
	dead          []string // ids of those that are dead letters
}

// deadPortion returns the portion that follows another.
func (m *migration) deadPortion(ctx context.Context, after deadPortion) (p deadPortion, err error) {
	rows, err := m.session.QueryContext(ctx, sqlfiles.MigrateSection("dead portion"), after.createdAt, after.id)
	if err != nil {
		return p, err
	}
	defer rows.Close()
	for rows.Next() {
		var dead bool
		if err := rows.Scan(&p.createdAt, &p.id, &dead); err != nil {
			return p, err
		}
		if dead {
			p.dead = append(p.dead, p.id)
		}
	}
	return p, rows.Err()
}
