package main

import (
	"context"
	"strings"

	"github.com/lib/pq"
)

// checkSchema asks what migrate would do, and reports whether that is nothing.
func (d *doctor) checkSchema(ctx context.Context) (current bool) {
	pending, err := pendingMigration(ctx, d.cfg)
	switch {
	case err != nil:
		d.fault("schema", "see the message", "%v", err)
	case len(pending) > 0:
		d.fault("schema", mendMigrate, "not up to date, migrate would: %s", strings.Join(pending, "; "))
	default:
		d.ok("schema", "tables, columns, indexes, trigger and view are up to date")
		return true
	}
	return false
}

// pendingMigration returns what migrate would do, and changes nothing.
func pendingMigration(ctx context.Context, cfg Config) (pending []string, err error) {
	dsn, err := cfg.databaseDSN()
	if err != nil {
		return nil, err
	}
	pc, err := pq.NewConfig(dsn)
	if err != nil {
		return nil, migrateErrorf(errMigrateDSN, "DATABASE_URL: %s", scrubPQ(err))
	}
	m := &migration{}
	if m.session, err = openMigrateSession(ctx, pc); err != nil {
		return nil, migrateErrorOf("connect", err)
	}
	defer m.session.close()
	if err := m.checkServer(ctx); err != nil {
		return nil, migrateErrorOf("check the server", err)
	}
	facts, err := inspectOutbox(ctx, m.session, m.server.schema)
	if err != nil {
		return nil, migrateErrorOf("inspect", err)
	}
	if err := facts.conflict(m.server.schema, m.server.path); err != nil {
		return nil, err
	}
	for _, step := range plan(facts) {
		if step.did != "" {
			pending = append(pending, step.doing)
		}
	}
	if facts.events.exists() {
		for _, index := range missingIndexes(facts) {
			pending = append(pending, "build index "+index.Name)
		}
	}
	return pending, nil
}
