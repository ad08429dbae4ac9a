package migrate

import (
	"context"
	"strings"

	"github.com/lib/pq"

	"outbox-relay/internal/serverurl"
	sqlfiles "outbox-relay/sql"
)

// Pending returns what Run would do to the outbox in the database at dsn, a line each, and changes nothing.
// Errors are those of Run.
func Pending(ctx context.Context, dsn string) (pending []string, err error) {
	dsn, faults := serverurl.PrepareDSN(dsn)
	if len(faults) > 0 {
		return nil, errorf(ErrDSN, "DATABASE_URL: %s", strings.Join(faults, "; "))
	}
	cfg, err := pq.NewConfig(dsn)
	if err != nil {
		return nil, errorf(ErrDSN, "DATABASE_URL: %s", serverurl.ScrubPQ(err))
	}
	m := &migration{}
	if m.session, err = openSession(ctx, cfg); err != nil {
		return nil, errorOf("connect", err)
	}
	defer m.session.close()
	if err := m.checkServer(ctx); err != nil {
		return nil, errorOf("check the server", err)
	}
	if _, err := m.session.ExecContext(ctx, sqlfiles.MigrateSection("bounded")); err != nil {
		return nil, errorOf("set limits", err)
	}
	facts, err := inspectOutbox(ctx, m.session, m.server.schema)
	if err != nil {
		return nil, errorOf("inspect", err)
	}
	if err := facts.conflict(m.server.schema, m.server.path); err != nil {
		return nil, err
	}
	for _, step := range plan(facts) {
		if step.did != "" {
			pending = append(pending, step.doing)
		}
	}
	if !facts.events.exists() {
		return pending, nil
	}
	for _, index := range missingIndexes(facts) {
		pending = append(pending, "build index "+index.Name)
	}
	if _, ok := facts.index(olderIndex); ok {
		pending = append(pending, "drop index "+olderIndex)
	}
	if _, ok := facts.events.column("dead_at"); ok && facts.deadUnmarked() {
		pending = append(pending, "mark the dead letters of the older form")
	}
	return pending, nil
}
