package main

import (
	"context"
	"errors"
	"strings"

	"outbox-relay/internal/migrate"
)

// checkSchema asks what migrate would do, and reports whether that is nothing, and whether the table is one of ours.
func (d *doctor) checkSchema(ctx context.Context) (current, ours bool) {
	dsn, err := d.cfg.databaseDSN()
	if err != nil {
		d.fault("schema", "see the message", "%v", err)
		return false, true
	}
	pending, err := migrate.Pending(ctx, dsn)
	switch {
	case errors.Is(err, migrate.ErrConflict):
		d.fault("schema", "name the outbox's schema with search_path in DATABASE_URL, or rename what is in the way", "%v", err)
		return false, false
	case errors.Is(err, migrate.ErrRights):
		d.unknown("schema", "see the finding on rights", "could not be checked for want of a right: %v", err)
		return true, true
	case err != nil:
		d.fault("schema", "see the message", "%v", err)
	case len(pending) > 0:
		d.fault("schema", mendMigrate, "not up to date, migrate would: %s", strings.Join(pending, "; "))
	default:
		d.ok("schema", "tables, columns, indexes, trigger and view are up to date")
		return true, true
	}
	return false, true
}
