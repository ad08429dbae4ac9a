package main

import (
	"fmt"
	"strings"
	"testing"

	"outbox-relay/internal/testenv"
	sqlfiles "outbox-relay/sql"
)

// The relay's statements follow the partial indexes, whatever the statistics say: a queue is empty when
// it is analysed and full a minute later, or the other way round. The plans are those of the
// working session's own settings and statements, prepared as it prepares them.
func TestPlansFollowTheIndexesWithAnyStatistics(t *testing.T) {
	const fill = `INSERT INTO outbox_events (aggregate_type, aggregate_id, event_type, payload, processed_at, retry_after, dead_at, attempts)
		SELECT 'order', (i % 5000)::text, 'order.created', '{}',
		       CASE WHEN i % 10 > 0 THEN now() END,
		       CASE WHEN i % 200 = 0 THEN now() + interval '1 hour' END,
		       CASE WHEN i % 1000 = 10 THEN now() END, 0
		FROM generate_series(1, 200000) i`
	for name, statements := range map[string][]string{
		"never analysed":               {fill},
		"analysed empty, then filled":  {"ANALYZE outbox_events", fill},
		"filled, then analysed":        {fill, "ANALYZE outbox_events"},
		"analysed without failures":    {strings.NewReplacer("i % 200 = 0", "false", "i % 1000 = 10", "false").Replace(fill), "ANALYZE outbox_events", fill},
		"analysed full, then emptied":  {fill, "ANALYZE outbox_events", "DELETE FROM outbox_events WHERE processed_at IS NULL"},
		"one aggregate, then analysed": {strings.ReplaceAll(fill, "(i % 5000)::text", "'1'"), "ANALYZE outbox_events"},
	} {
		t.Run(name, func(t *testing.T) {
			dsn := testenv.Database(t)
			migrated(t, dsn)
			db := testenv.DB(t, dsn)
			testenv.MustExec(t, db, "ALTER TABLE outbox_events SET (autovacuum_enabled = off)")
			for _, s := range statements {
				testenv.MustExec(t, db, s)
			}
			tx := testenv.Begin(t, db, sqlfiles.Session("setup")) // one session

			testenv.MustExec(t, tx, "PREPARE few AS "+sqlfiles.ClaimFew("jsonb"))
			wantPlan(t, "claim few", explain(t, tx, "EXECUTE few(0, 16, 2000, true)"),
				[]string{"using outbox_events_fresh", "using outbox_events_retry", "using outbox_events_blocking"},
				"Seq Scan on outbox_events", "Bitmap", "Sort", "Parallel")
			for _, ordered := range []bool{true, false} {
				testenv.MustExec(t, tx, "PREPARE claim AS "+sqlfiles.Claim(ordered, false, "jsonb"))
				args := "0, 1000, 16777216, 16777216, '{00000000-0000-0000-0000-000000000001}'"
				if ordered {
					args += ", false"
				}
				plan := explain(t, tx, "EXECUTE claim("+args+")")
				testenv.MustExec(t, tx, "DEALLOCATE claim")
				want := []string{"Index Scan using outbox_events_fresh on outbox_events e", "Index Scan using outbox_events_retry on outbox_events e", "hashed SubPlan"}
				if ordered {
					want = append(want, "Index Cond: (((aggregate_type)::text = (e_1.aggregate_type)::text) AND ((aggregate_id)::text = (e_1.aggregate_id)::text)")
				}
				if ordered && name == "one aggregate, then analysed" {
					want = append(want, "Memoize") // what holds an aggregate back is looked up once for all that wait
				}
				wantPlan(t, fmt.Sprintf("claim, ordered %v", ordered), plan, want, "Seq Scan on outbox_events", "Bitmap", "Materialize", "Sort Key: e.", "Hash Join", "Parallel")
			}
			testenv.MustExec(t, tx, sqlfiles.Status("planner"))
			plan := explain(t, tx, strings.ReplaceAll(strings.TrimSpace(sqlfiles.Backlog), "$1", "true"))
			wantPlan(t, "backlog", plan, []string{"using outbox_events_fresh", "using outbox_events_blocking"},
				"Seq Scan on outbox_events", "outbox_events_pkey", "Parallel")
			for _, variant := range [][2]bool{{false, false}, {false, true}, {true, false}, {true, true}} {
				testenv.MustExec(t, tx, "PREPARE settle AS "+sqlfiles.Settle(variant[0], variant[1]))
				plan := explain(t, tx, "EXECUTE settle('{00000000-0000-0000-0000-000000000001}', '{}', '{}', '{}', '{}', '{}', '{}', false)")
				testenv.MustExec(t, tx, "DEALLOCATE settle")
				wantPlan(t, "settle", plan, []string{"outbox_events_pkey on outbox_events"}, "Seq Scan on outbox_events", "Bitmap", "Hash Join")
			}
		})
	}
}

// wantPlan fails the test unless a plan has all of want and nothing of never.
func wantPlan(t *testing.T, what, plan string, want []string, never ...string) {
	t.Helper()
	for _, s := range want {
		if !strings.Contains(plan, s) {
			t.Errorf("%s: no %q in\n%s", what, s, plan)
			return
		}
	}
	for _, s := range never {
		if strings.Contains(plan, s) {
			t.Errorf("%s: %q in\n%s", what, s, plan)
			return
		}
	}
}
