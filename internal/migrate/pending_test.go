package migrate

import (
	"strings"
	"testing"

	"outbox-relay/internal/testenv"
)

// What Pending says is what Run then does, also where an upgrade was cut off in the middle.
func TestPendingSaysWhatRunWouldDo(t *testing.T) {
	dsn, db := testenv.OpenDatabase(t)
	pending := func() string {
		t.Helper()
		lines, err := Pending(t.Context(), dsn)
		if err != nil {
			t.Fatal(err)
		}
		return strings.Join(lines, "\n")
	}
	want := func(got string, parts ...string) {
		t.Helper()
		for _, part := range parts {
			if !strings.Contains(got, part) {
				t.Errorf("pending = %q, want it to say %q", got, part)
			}
		}
		if len(parts) == 0 && got != "" {
			t.Errorf("pending = %q, want nothing", got)
		}
	}
	testenv.MustExec(t, db, olderSchema(t))
	want(pending(), "seq", "build index outbox_events_fresh", "drop index "+olderIndex)
	want(pending(), "seq") // and it was not done by asking
	migrated(t, dsn)
	want(pending())
	testenv.MustExec(t, db, "CREATE INDEX "+olderIndex+" ON outbox_events (created_at) WHERE processed_at IS NULL; "+
		sqlComment(t, "add dead_at")+"; DROP INDEX outbox_events_retry")
	want(pending(), "drop index "+olderIndex, "build index outbox_events_retry", "mark the dead letters")
	migrated(t, dsn)
	want(pending())
}
