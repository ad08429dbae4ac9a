package test

import (
	"testing"

	"outbox-relay/internal/testenv"
)

// oldTable is the outbox as applications had it before the relay's migrate.
func oldTable(payloadType string) string {
	return `
CREATE TABLE outbox_events (
    id             UUID PRIMARY KEY DEFAULT gen_random_uuid(),
    aggregate_type VARCHAR(100) NOT NULL,
    aggregate_id   VARCHAR(100) NOT NULL,
    event_type     VARCHAR(100) NOT NULL,
    payload        ` + payloadType + ` NOT NULL,
    attempts       INT NOT NULL DEFAULT 0,
    created_at     TIMESTAMPTZ NOT NULL DEFAULT now(),
    processed_at   TIMESTAMPTZ
);
CREATE INDEX idx_outbox_unprocessed ON outbox_events (created_at) WHERE processed_at IS NULL;
CREATE FUNCTION notify_outbox_event() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    PERFORM pg_notify('outbox_event', NEW.id::text);
    RETURN NEW;
END $$;
CREATE TRIGGER outbox_event_inserted AFTER INSERT ON outbox_events
    FOR EACH ROW EXECUTE FUNCTION notify_outbox_event();
CREATE VIEW outbox_dead_letters AS SELECT * FROM outbox_events WHERE processed_at IS NULL AND attempts >= 5;`
}

// Of the old table's rows the pending are published in the order of created_at, before newer ones;
// processed and given-up ones are not.
func TestUpgradedTableIsPublished(t *testing.T) {
	t.Parallel()
	dsn := testenv.Database(t)
	testenv.Exec(t, dsn, oldTable("jsonb")+`
INSERT INTO outbox_events (aggregate_type, aggregate_id, event_type, payload, attempts, created_at, processed_at)
SELECT 'order', '1', CASE i % 3 WHEN 0 THEN 'processed' WHEN 1 THEN 'pending' ELSE 'dead' END, to_jsonb(i),
       CASE i % 3 WHEN 2 THEN 5 ELSE 2 END, now() - (1000 - i) * interval '1 second', CASE i % 3 WHEN 0 THEN now() END
FROM generate_series(300, 1, -1) i`)
	said := migrate(t, dsn)
	wantReason(t, "what migrate says", said, "100")

	o := outboxOn(t, dsn, testenv.Vhost(t)) // migrates once more
	if n := o.count(t, "dead_at IS NOT NULL AND event_type = 'dead'"); n != 100 {
		t.Errorf("%d dead letters, want 100", n)
	}
	q := testenv.Consume(t, o.amqpURL, exchange)
	o.insert(t, event{eventType: "new"})
	p := o.start(t, "FALLBACK_INTERVAL=1h")
	got := q.Collect(t, 101, patience)
	for i, d := range got[:100] {
		if want := 1 + 3*i; d.Type != "pending" || string(d.Body) != itoa(want) {
			t.Fatalf("message %d is %s %s, want pending %d", i, d.Type, d.Body, want)
		}
	}
	if got[100].Type != "new" {
		t.Errorf("last message is %s, want new", got[100].Type)
	}
	p.Ready(t)
	for range 3 { // one after the other, each with its ring
		o.insert(t, event{eventType: "new"})
		q.Next(t, patience)
	}
	o.waitRowCount(t, "processed_at IS NULL AND dead_at IS NULL", 0)
	if n := o.count(t, "processed_at IS NOT NULL"); n != 204 {
		t.Errorf("%d events processed, want 204", n)
	}
}

// What trying again does not mend ends with 2, so that a job is not started over and over.
func TestMigrateTellsAMistakeFromAFailure(t *testing.T) {
	t.Parallel()
	dsn := testenv.Database(t)
	testenv.Exec(t, dsn, "CREATE TABLE outbox_events (id int PRIMARY KEY)")
	code, _, stderr := testenv.Command(t, []string{"DATABASE_URL=" + dsn}, "migrate")
	if code != 2 {
		t.Errorf("another's table: exit code %d, want 2: %s", code, stderr)
	}
	code, _, stderr = testenv.Command(t, []string{"DATABASE_URL=postgres://relay@127.0.0.1:1/shop"}, "migrate")
	if code != 1 {
		t.Errorf("no server: exit code %d, want 1: %s", code, stderr)
	}
}
