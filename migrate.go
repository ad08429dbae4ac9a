package main

import (
	"context"
	"database/sql"
	"fmt"
	"io"

	"github.com/lib/pq"

	sqlfiles "outbox-relay/sql"
)

// runMigrate creates or upgrades the outbox in the database at dsn and writes to w, line by line,
// what it did.
func runMigrate(ctx context.Context, dsn string, w io.Writer) error {
	connector, err := pq.NewConnector(dsn)
	if err != nil {
		return fmt.Errorf("migrate: DATABASE_URL is not a valid connection string") // pq's error quotes it
	}
	db := sql.OpenDB(connector)
	defer db.Close()
	if _, err := db.ExecContext(ctx, sqlfiles.Schema); err != nil {
		return fmt.Errorf("migrate: %w", err)
	}
	fmt.Fprintln(w, "schema is up to date")
	return nil
}
