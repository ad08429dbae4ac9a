package main

import (
	"fmt"
	"strings"
	"testing"

	"outbox-relay/internal/testenv"
	sqlfiles "outbox-relay/sql"
)

// The statements are planned with their values, so what a filter does not ask for costs nothing.
func TestDeadLettersAreFoundByTheirIndexes(t *testing.T) {
	_, db := testenv.OpenDatabase(t)
	testenv.MustExec(t, db, sqlfiles.Schema)
	testenv.MustExec(t, db, "ANALYZE outbox_events") // statistics of an empty table
	testenv.MustExec(t, db, `INSERT INTO outbox_events (aggregate_type, aggregate_id, event_type, payload, processed_at, retry_after, dead_at, last_error)
		SELECT 'order', (i % 1000)::text, 'order.created', '{}',
		       CASE WHEN i % 100 > 2 THEN now() END,
		       CASE WHEN i % 100 = 1 THEN now() END,
		       CASE WHEN i % 100 = 2 THEN now() END, 'returned: no queue'
		FROM generate_series(1, 20000) i`)
	tx := testenv.Begin(t, db, readPlan)
	const none = "NULL, NULL, NULL, NULL, NULL, NULL, NULL"
	const byID = "ARRAY[gen_random_uuid()], NULL, NULL, NULL, NULL, NULL, NULL"
	for i, tc := range []struct{ section, args, index string }{
		{"count", none, "outbox_events_blocking"},
		{"count", "NULL, 'a', 'b', 'c', 'd', now(), now()", "outbox_events_blocking"},
		{"list", none + ", 50", "outbox_events_blocking"},
		{"portion", none + ", NULL, NULL, NULL, NULL, NULL, 500", "outbox_events_blocking"},
		{"portion", none + ", 'order', '7', 7, now(), gen_random_uuid(), 500", "outbox_events_blocking"},
		{"count", byID, "outbox_events_pkey"},
		{"portion", byID + ", NULL, NULL, NULL, NULL, NULL, 500", "outbox_events_pkey"},
		{"show", "gen_random_uuid()", "outbox_events_pkey"},
		{"retry", "ARRAY[gen_random_uuid()]", "outbox_events_pkey"},
		{"discard", "ARRAY[gen_random_uuid()], 'me'", "outbox_events_pkey"},
	} {
		testenv.MustExec(t, tx, fmt.Sprintf("PREPARE s%d AS %s", i, sqlfiles.DeadLetters(tc.section)))
		plan := explain(t, tx, fmt.Sprintf("EXECUTE s%d (%s)", i, tc.args))
		if !strings.Contains(plan, tc.index) || strings.Contains(plan, "Seq Scan") {
			t.Errorf("%s (%s) does not use %s:\n%s", tc.section, tc.args, tc.index, plan)
		}
		if tc.section == "portion" && strings.Contains(tc.args, "'7'") && !strings.Contains(plan, "Index Cond: (ROW(") {
			t.Errorf("a portion reads those before it again:\n%s", plan)
		}
	}
}

// A late confirm settles an event that was given up meanwhile. It is published then, and not discarded.
func TestDeadLetterThatIsConfirmedWasNotDiscarded(t *testing.T) {
	_, db := testenv.OpenDatabase(t)
	testenv.MustExec(t, db, sqlfiles.Schema)
	testenv.InsertEvent(t, db)
	testenv.MustExec(t, db, "UPDATE outbox_events SET dead_at = now()")
	var id string
	if err := db.QueryRow("SELECT id FROM outbox_events").Scan(&id); err != nil {
		t.Fatal(err)
	}
	for _, skipLocked := range []bool{false, true} {
		tx := testenv.Begin(t, db, "SELECT 1")
		testenv.MustExec(t, tx, "PREPARE settle AS "+sqlfiles.Settle(false, skipLocked))
		testenv.MustExec(t, tx, "EXECUTE settle ('{"+id+"}', '{}', '{}', '{}', '{}', '{}', '{}', false)")
		if got := testenv.QueryInt(t, tx, "SELECT count(*) FROM outbox_events WHERE processed_at IS NOT NULL AND dead_at IS NULL"); got != 1 {
			t.Errorf("skip locked %v: %d events are published and nothing else, want 1", skipLocked, got)
		}
		testenv.MustExec(t, tx, "DEALLOCATE settle")
		_ = tx.Rollback()
	}
}

func TestTextsOfRowsAreSafeInATerminal(t *testing.T) {
	if got, want := printable("a\x1b[31m\nb\u202e\tä"), "a [31m b  ä"; got != want {
		t.Errorf("printable = %q, want %q", got, want)
	}
	if got := printable(strings.Repeat("ä", 100)); got != strings.Repeat("ä", 60)+"..." {
		t.Errorf("printable = %q", got)
	}
}
