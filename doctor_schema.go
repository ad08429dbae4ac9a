package main

import (
	"context"
	"strings"

	"outbox-relay/internal/migrate"
)

// checkSchema asks what migrate would do, and reports whether that is nothing.
func (d *doctor) checkSchema(ctx context.Context) (current bool) {
	dsn, err := d.cfg.databaseDSN()
	if err != nil {
		d.fault("schema", "see the message", "%v", err)
		return false
	}
	pending, err := migrate.Pending(ctx, dsn)
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
