package bench

import (
	"database/sql"
	"fmt"
	"testing"

	"outbox-relay/internal/testenv"
)

// What a table may look like after a while. Each is prepared before the relay starts.

// processedRows fills it with rows that were published long ago.
func processedRows(rows int) func(*testing.T, outbox) {
	return func(t *testing.T, o outbox) {
		fill(t, o, fmt.Sprintf(`INSERT INTO outbox_events (aggregate_type, aggregate_id, event_type, payload, processed_at)
			SELECT '%s', n %% 1000, '%s', jsonb_build_object('n', 0, 'pad', '%s'), now() FROM generate_series(1, %d) n`,
			aggregateType, eventType, padding(*payload), rows))
	}
}

// blockedRows fills it with events behind one of their aggregate that has failed.
func blockedRows(rows int) func(*testing.T, outbox) {
	return func(t *testing.T, o outbox) {
		fill(t, o, fmt.Sprintf(`INSERT INTO outbox_events (aggregate_type, aggregate_id, event_type, payload)
				SELECT 'blocked', 1, '%s', '{}' FROM generate_series(0, %d);
			UPDATE outbox_events SET attempts = 1, retry_after = now() + interval '1 day'
				WHERE seq = (SELECT min(seq) FROM outbox_events)`, eventType, rows))
	}
}

// fill writes as much as it takes, and leaves no work of it to the server for later.
func fill(t *testing.T, o outbox, statement string) {
	t.Helper()
	db := testenv.DB(t, o.dsn)
	for _, s := range []string{statement, `VACUUM ANALYZE outbox_events`, `CHECKPOINT`} {
		if _, err := db.ExecContext(t.Context(), s); err != nil {
			t.Fatalf("%.60s: %v", s, err)
		}
	}
}

// oldSnapshot keeps vacuum from removing what is processed until the measurement's end.
func oldSnapshot(t *testing.T, o outbox) {
	t.Helper()
	tx, err := testenv.DB(t, o.dsn).BeginTx(t.Context(), &sql.TxOptions{Isolation: sql.LevelRepeatableRead})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = tx.Rollback() })
	if _, err := tx.ExecContext(t.Context(), `SELECT count(*) FROM outbox_events`); err != nil {
		t.Fatal(err)
	}
}
