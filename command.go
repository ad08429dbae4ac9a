package main

import (
	"context"
	"fmt"
	"io"
	"strings"

	"outbox-relay/internal/migrate"
)

// command is what the relay's binary is asked to do. Its flags and arguments, if any, are its
// fields, filled in by kong.
type command interface {
	// uses reports whether the command looks at a setting. One that needs little should not fail
	// for the rest: migrate often runs where nobody has set AMQP_URL.
	uses(setting string) bool
	// run does it, until ctx is done at the latest. Errors are for people and hold no secrets.
	run(ctx context.Context, cfg Config, std stdio) error
}

// stdio is what a command may write to, and the environment it was started in.
type stdio struct {
	out, err io.Writer
	environ  []string
}

// Commands with few needs; the others stand in files of their own.
type (
	runCommand         struct{}
	migrateCommand     struct{}
	healthcheckCommand struct{}
	versionCommand     struct{}
)

func (runCommand) uses(string) bool                 { return true }
func (migrateCommand) uses(setting string) bool     { return ofDatabase(setting) }
func (healthcheckCommand) uses(setting string) bool { return setting == "HTTP_ADDR" }
func (versionCommand) uses(string) bool             { return false }

// ofDatabase reports whether a setting, or a variable that lib/pq reads, is about the connection to PostgreSQL.
func ofDatabase(setting string) bool {
	return strings.HasPrefix(setting, "DATABASE_URL") || strings.HasPrefix(setting, "PG")
}

func (runCommand) run(ctx context.Context, cfg Config, std stdio) error {
	return serveRelay(ctx, cfg, std, runRelay)
}

func (migrateCommand) run(ctx context.Context, cfg Config, std stdio) error {
	dsn, err := cfg.databaseDSN()
	if err != nil {
		return err
	}
	return migrate.Run(ctx, dsn, std.out)
}

func (healthcheckCommand) run(ctx context.Context, cfg Config, std stdio) error {
	return runHealthcheck(ctx, cfg, std.out)
}

func (versionCommand) run(_ context.Context, _ Config, std stdio) error {
	_, err := fmt.Fprintln(std.out, versionLine())
	return err
}
