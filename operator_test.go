package main

import (
	"bytes"
	"encoding/json"
	"strings"
	"testing"

	"outbox-relay/internal/testenv"
	sqlfiles "outbox-relay/sql"
)

// openTestOperator opens the session of a command on the database at dsn.
func openTestOperator(t *testing.T, dsn, command string) *operator {
	t.Helper()
	cfg := validConfig(t)
	cfg.DatabaseURL = dsn
	o, err := openOperator(t.Context(), cfg, command)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(o.Close)
	return o
}

func TestOperatorsAreKnownByTheirCommand(t *testing.T) {
	dsn, db := testenv.OpenDatabase(t)
	testenv.MustExec(t, db, sqlfiles.Schema)
	o := openTestOperator(t, dsn, "dead-letters retry")
	if got := testenv.QueryInt(t, db, "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND application_name = 'outbox-relay dead-letters retry'"); got != 1 {
		t.Errorf("%d sessions bear the command's name, want 1", got)
	}
	if o.table != tableOID(t, db) || o.schema != "public" {
		t.Errorf("table %d in schema %q, want %d in public", o.table, o.schema, tableOID(t, db))
	}
	var limit string
	if err := o.QueryRowContext(t.Context(), "SHOW statement_timeout").Scan(&limit); err != nil || limit != "10s" {
		t.Errorf("statement_timeout = %q, %v", limit, err)
	}
	o.Close()
	testenv.Until(t, func() bool {
		return testenv.QueryInt(t, db, "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND application_name LIKE 'outbox-relay %'") == 0
	})
}

func TestOperatorNeedsAnOutbox(t *testing.T) {
	dsn, db := testenv.OpenDatabase(t)
	cfg := validConfig(t)
	cfg.DatabaseURL = dsn
	for _, tc := range []struct{ name, change, want string }{
		{"no table", "SELECT 1", "outbox_events does not exist in the search_path: run `outbox-relay migrate`"},
		{"an older table", readSQL(t, "../internal/migrate/testdata/older_schema.sql"), "not up to date: run `outbox-relay migrate`"},
	} {
		testenv.MustExec(t, db, tc.change)
		if _, err := openOperator(t.Context(), cfg, "status"); err == nil || !strings.Contains(err.Error(), tc.want) {
			t.Errorf("%s: %v, want %q", tc.name, err, tc.want)
		}
	}
}

func TestOperatorSaysWhatRightIsMissing(t *testing.T) {
	dsn, db := testenv.OpenDatabase(t)
	testenv.MustExec(t, db, sqlfiles.Schema)
	o := openTestOperator(t, testenv.AsRole(t, dsn, testenv.Role(t, db)), "pause")
	_, err := o.ExecContext(t.Context(), "SELECT FROM outbox_events")
	if err := operatorError("count events", err); err == nil || !strings.Contains(err.Error(), "count events: the database role lacks a right, sql/roles.sql lists them") {
		t.Errorf("error = %v", err)
	}
}

// An audit line must not depend on how much else is logged.
func TestAuditIsWrittenAtEveryLogLevel(t *testing.T) {
	dsn, db := testenv.OpenDatabase(t)
	testenv.MustExec(t, db, sqlfiles.Schema)
	o := openTestOperator(t, dsn, "pause")
	var log bytes.Buffer
	o.audit(stdio{err: &log}, Config{LogLevel: "error", LogFormat: "json"}, "outbox paused", keyCount, 3)
	var line map[string]any
	if err := json.Unmarshal(log.Bytes(), &line); err != nil {
		t.Fatal(err)
	}
	if by, _ := line["by"].(string); !strings.Contains(by, "@") || !strings.Contains(by, "database user "+o.user) {
		t.Errorf("by = %q", by)
	}
	if line["msg"] != "outbox paused" || line["command"] != "pause" || line["schema"] != "public" || line["count"] != 3.0 {
		t.Errorf("audit line = %v", line)
	}
}
