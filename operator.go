package main

import (
	"context"
	"database/sql"
	"database/sql/driver"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"os/user"
	"strings"

	"github.com/lib/pq"
	"github.com/lib/pq/pqerror"

	"outbox-relay/internal/boundedconn"
	"outbox-relay/internal/migrate"
	"outbox-relay/internal/serverurl"
	sqlfiles "outbox-relay/sql"
)

// operator is the session of a command that a person runs beside the relays: status, pause,
// dead-letters and the like. It is bounded in every wait: connecting by connectTimeout, statements
// and locks by the settings in sql/operator.sql, and each answer by answerTimeout. It is never repaired. Not safe for concurrent use.
type operator struct {
	*sql.Conn
	db      *sql.DB
	cfg     Config
	command string
	table   uint32 // oid of outbox_events
	schema  string // of outbox_events
	user    string // of the database
}

// openOperator connects and finds the outbox. The caller closes the session. command is how the
// command is typed, like "dead-letters retry": the session has it in its application_name.
func openOperator(ctx context.Context, cfg Config, command string) (*operator, error) {
	o, err := connectOperator(ctx, cfg, command)
	if err != nil {
		return nil, err
	}
	if err := o.find(ctx); err != nil {
		o.Close()
		return nil, err
	}
	return o, nil
}

// connectOperator connects, and does not look for an outbox yet. It returns errPooler where settings would
// be those of whoever comes next.
func connectOperator(ctx context.Context, cfg Config, command string) (*operator, error) {
	dsn, err := cfg.databaseDSN()
	if err != nil {
		return nil, err
	}
	pc, err := pq.NewConfig(dsn)
	if err != nil {
		return nil, fmt.Errorf("DATABASE_URL: %s", serverurl.ScrubPQ(err))
	}
	if pc.ApplicationName == serverurl.ApplicationName { // not one of the user's
		pc.ApplicationName += " " + command
	}
	connector, err := pq.NewConnectorConfig(pc)
	if err != nil {
		return nil, fmt.Errorf("DATABASE_URL: %s", serverurl.ScrubPQ(err))
	}
	connector.Dialer(boundedconn.Dialer{ConnectTimeout: connectTimeout, ReadTimeout: answerTimeout, WriteTimeout: connectTimeout})
	o := &operator{db: sql.OpenDB(connector), cfg: cfg, command: command}
	if o.Conn, err = o.db.Conn(ctx); err != nil {
		_ = o.db.Close()
		return nil, operatorError("connect to PostgreSQL", err)
	}
	if err := o.prepare(ctx); err != nil {
		o.Close()
		return nil, operatorError("connect to PostgreSQL", err)
	}
	return o, nil
}

func (o *operator) prepare(ctx context.Context) error {
	var pid int
	if err := o.QueryRowContext(ctx, sqlfiles.Session("backend")).Scan(&pid); err != nil {
		return err
	}
	if err := refusePooler(ctx, o.db, o.Conn, pid); err != nil {
		return err
	}
	_, err := o.ExecContext(ctx, sqlfiles.Operator("settings"))
	return err
}

// find looks for the outbox in the database.
func (o *operator) find(ctx context.Context) error {
	var table sql.NullInt64
	var schema sql.NullString
	var version int
	var standby, current bool
	err := o.QueryRowContext(ctx, sqlfiles.Operator("facts")).Scan(&table, &schema, &o.user, &version, &standby, &current)
	switch {
	case err != nil:
		return operatorError("look for the outbox", err)
	case version < minServerVersion:
		return fmt.Errorf("PostgreSQL %d is too old: the relay needs 14 or later", version/10000)
	case standby:
		return errors.New("the server is a read-only standby: name the primary, or all hosts and target_session_attrs=read-write")
	case !table.Valid:
		return errNoTable
	case !current:
		if err := notOurs(ctx, o.cfg); err != nil {
			return err
		}
		return errors.New("the outbox's schema is not up to date: run `outbox-relay migrate`")
	}
	o.table, o.schema = uint32(table.Int64), schema.String
	return nil
}

// Close ends the session. Safe to call twice.
func (o *operator) Close() {
	// Raw with ErrBadConn closes the connection; Conn.Close would wait for a statement in progress.
	_ = o.Raw(func(any) error { return driver.ErrBadConn })
	_ = o.db.Close()
}

// operatorError is explained, with what was being done.
func operatorError(doing string, err error) error {
	if err == nil {
		return nil
	}
	return fmt.Errorf("%s: %w", doing, explained(err))
}

var errNoTable = errors.New("table outbox_events does not exist in the search_path: run `outbox-relay migrate`, " +
	"or name its schema with search_path in DATABASE_URL")

// explained says what a person can do about an error of the database. Neither the server's errors
// nor those of the network hold a password.
func explained(err error) error {
	undefined := pq.As(err, pqerror.UndefinedTable)
	switch {
	case undefined != nil && strings.Contains(undefined.Message, `"outbox_events"`):
		return fmt.Errorf("%w: %w", errNoTable, err)
	case undefined != nil, pq.As(err, pqerror.UndefinedColumn, pqerror.UndefinedFunction) != nil:
		return fmt.Errorf("the outbox's schema is not up to date: run `outbox-relay migrate`: %w", err)
	case pq.As(err, pqerror.InsufficientPrivilege) != nil:
		return fmt.Errorf("the database role lacks a right, sql/roles.sql lists them: %w", err)
	case pq.As(err, pqerror.ReadOnlySQLTransaction) != nil:
		return fmt.Errorf("the database is read-only: %w", err)
	}
	return err
}

// notOurs returns why the tables of DATABASE_URL cannot be an outbox of ours, also by no upgrade; nil where that is
// not so, or not known.
func notOurs(ctx context.Context, cfg Config) error {
	dsn, err := cfg.databaseDSN()
	if err != nil {
		return nil // which the next connect tells
	}
	if _, err := migrate.Pending(ctx, dsn); errors.Is(err, migrate.ErrConflict) {
		return err
	}
	return nil
}

// audit writes down a change of state: who did what, and to how many. It is a log line like the
// relay's own, and is written whatever LOG_LEVEL says.
func (o *operator) audit(std stdio, cfg Config, what string, args ...any) {
	o.auditEnd(std, cfg, nil, what, args...)
}

// auditEnd is audit for what may have ended early by an error: the line is one of level ERROR then.
func (o *operator) auditEnd(std stdio, cfg Config, ended error, what string, args ...any) {
	log, err := newLogger(std.err, slog.LevelInfo.String(), cfg.LogFormat)
	if err != nil {
		return // LOG_FORMAT was checked
	}
	level := slog.LevelInfo
	args = append([]any{"command", o.command, "schema", o.schema, "by", o.who()}, args...)
	if ended != nil {
		level = slog.LevelError
		args = append(args, keyErr, ended)
	}
	log.Log(context.Background(), level, what, args...)
}

// who names the person as far as it can be known.
func (o *operator) who() string {
	host, _ := os.Hostname()
	name := fmt.Sprint("uid ", os.Getuid())
	if u, err := user.Current(); err == nil {
		name = u.Username
	}
	return fmt.Sprintf("%s@%s, database user %s", name, host, o.user)
}
