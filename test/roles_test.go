package test

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"net/url"
	"strings"
	"testing"
	"time"

	"github.com/lib/pq"

	"outbox-relay/internal/testenv"
)

// withRoles runs sql/roles.sql on an outbox and returns it as a login of each of the two roles sees it.
// Roles belong to the whole server, so the test gives them names of its own.
func (o *outbox) withRoles(t *testing.T) (app, relay *outbox) {
	t.Helper()
	suffix := fmt.Sprintf("_%08x", rand.Uint32())
	appRole, relayRole := "outbox_app"+suffix, "outbox_relay"+suffix
	testenv.Exec(t, o.dsn, strings.NewReplacer(
		"outbox_relay_state", "outbox_relay_state", "outbox_relay", relayRole, "outbox_app", appRole,
	).Replace(readFile(t, "../sql/roles.sql")))
	as := func(role string) *outbox {
		testenv.Exec(t, o.dsn, fmt.Sprintf("CREATE ROLE %s_login LOGIN PASSWORD 'test' IN ROLE %[1]s", role))
		t.Cleanup(func() {
			testenv.Exec(t, o.dsn, fmt.Sprintf("DROP OWNED BY %s, %[1]s_login; DROP ROLE %[1]s_login, %[1]s", role))
		})
		u := parse(t, o.dsn)
		u.User = url.UserPassword(role+"_login", "test")
		return &outbox{dsn: u.String(), amqpURL: o.amqpURL, db: testenv.DB(t, u.String())}
	}
	return as(appRole), as(relayRole)
}

// All that a relay does in its life, and an operator with the relay's login: publish what an application
// announces, give events up, look for the event that kills relays, stand by, pause, retry, replay, delete.
func TestRelayWorksWithTheRightsOfItsRole(t *testing.T) {
	t.Parallel()
	for _, ordering := range []string{"aggregate", "none"} {
		t.Run(ordering, func(t *testing.T) {
			t.Parallel()
			o := newOutbox(t)
			app, relay := o.withRoles(t)
			q := testenv.Consume(t, o.amqpURL, exchange, "order.#")
			settings := []string{
				"ORDERING=" + ordering, "FALLBACK_INTERVAL=1h", "MAX_ATTEMPTS=2", "RETRY_BASE=10ms", "RETENTION=1h",
			}
			// As relays leave it that died one after the other, some time ago.
			app.insertMany(t, 10, 10, "order.old")
			testenv.Exec(t, o.dsn, "UPDATE outbox_events SET processed_at = now() - interval '2 hours'")
			testenv.Exec(t, o.dsn, "UPDATE outbox_relay_state SET clean = false, deaths = 5")
			app.insertMany(t, 100, 10, "order.created")
			first := relay.start(t, settings...)
			q.Collect(t, 100, patience)
			o.waitRowCount(t, "event_type = 'order.old'", 0)
			second := relay.start(t, settings...)
			second.Ready(t)

			app.insert(t, event{}) // rings
			q.Next(t, patience)
			lost := app.insert(t, event{eventType: "nobody.listens", aggregate: "lost"})[0]
			o.waitDead(t, lost)
			wantFinding(t, relay.doctor(t), "rights", "ok")
			relay.mustOperate(t, "status")
			relay.mustOperate(t, "pause")
			relay.mustOperate(t, "resume")
			testenv.Consume(t, o.amqpURL, exchange, "nobody.#")
			relay.mustOperate(t, "dead-letters", "retry", lost)
			o.waitProcessed(t, lost)
			relay.mustOperate(t, "replay", lost)

			if code := first.Stop(t); code != 0 {
				t.Errorf("exit code %d, want 0", code)
			}
			app.insert(t, event{})
			q.Next(t, patience)
			third := relay.start(t, "ORDERING="+ordering, "FALLBACK_INTERVAL=1h", "RETENTION=immediate")
			third.Ready(t)
			second.Kill(t)
			app.insert(t, event{})
			q.Next(t, patience)
			o.waitRowCount(t, "processed_at IS NULL", 0)
			for _, p := range []*testenv.Process{first, second, third} {
				for _, refused := range []string{"permission denied", "lacks a right"} {
					if strings.Contains(p.Logs(), refused) {
						t.Errorf("a relay says %q", refused)
					}
				}
			}
		})
	}
}

// INSERT in all the ways applications write it, and of what is there no more than the ids.
func TestApplicationRoleInsertsAndDoesNothingElse(t *testing.T) {
	t.Parallel()
	o := newOutbox(t)
	app, relay := o.withRoles(t)
	q := testenv.Consume(t, o.amqpURL, exchange)
	relay.start(t, "FALLBACK_INTERVAL=1h").Ready(t)

	const insert = "INSERT INTO outbox_events (aggregate_type, aggregate_id, event_type, payload) VALUES ('order', '1', 'order.created', '{}')"
	id := testenv.Value[string](t, app.dsn, insert+" RETURNING id")
	if d := q.Next(t, patience); d.MessageId != id {
		t.Errorf("got %s, want %s", d.MessageId, id)
	}
	again := `INSERT INTO outbox_events (id, aggregate_type, aggregate_id, event_type, payload, headers)
		VALUES ('01234567-89ab-4def-8123-456789abcdef', 'order', '1', 'order.created', '{}', '{"tenant": "a"}') ON CONFLICT `
	for i, conflict := range []string{"(id) DO NOTHING", "(id) DO NOTHING", "DO NOTHING"} {
		if n, want := testenv.Exec(t, app.dsn, again+conflict), int64(max(0, 1-i)); n != want {
			t.Errorf("insert %d ON CONFLICT %s: %d rows, want %d", i+1, conflict, n, want)
		}
	}
	q.Next(t, patience)
	q.Quiet(t, 300*time.Millisecond)

	refused := []string{
		again + "(id) DO UPDATE SET payload = EXCLUDED.payload",
		insert + " RETURNING seq",
		"SELECT id, payload FROM outbox_events",
		"SELECT id FROM outbox_events FOR UPDATE",
		"TRUNCATE outbox_events",
		"ALTER TABLE outbox_events DISABLE TRIGGER outbox_notify",
		"DROP TABLE outbox_events CASCADE",
		"CREATE OR REPLACE FUNCTION outbox_notify() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN RETURN NULL; END'",
		"INSERT INTO outbox_relay_state DEFAULT VALUES",
		"INSERT INTO outbox_suspects (id, deaths) VALUES (gen_random_uuid(), 1)",
	}
	// The columns that are not the application's to fill in or to change.
	for _, column := range testenv.Query[string](t, o.dsn, `SELECT attname::text FROM pg_attribute
		WHERE attrelid = 'outbox_events'::regclass AND attnum > 0 AND NOT attisdropped`) {
		refused = append(refused, fmt.Sprintf("UPDATE outbox_events SET %s = DEFAULT", column))
		switch column {
		case "id", "aggregate_type", "aggregate_id", "event_type", "payload", "headers":
		default:
			refused = append(refused, fmt.Sprintf(`INSERT INTO outbox_events (aggregate_type, aggregate_id, event_type, payload, %s)
				VALUES ('order', '1', 'order.created', '{}', DEFAULT)`, column))
		}
	}
	for _, relation := range testenv.Query[string](t, o.dsn, `SELECT relname::text FROM pg_class
		WHERE relnamespace = current_schema()::regnamespace AND relkind IN ('r', 'v') AND relname LIKE 'outbox%'`) {
		for _, statement := range []string{"SELECT * FROM ", "DELETE FROM ", "LOCK TABLE "} {
			refused = append(refused, statement+relation)
		}
	}
	for _, statement := range refused {
		tx, err := app.db.BeginTx(t.Context(), nil)
		if err != nil {
			t.Fatal(err)
		}
		_, err = tx.ExecContext(t.Context(), statement)
		_ = tx.Rollback()
		// insufficient_privilege, and no other error: that might hide a right.
		if e := new(pq.Error); !errors.As(err, &e) || e.Code != "42501" {
			t.Errorf("%s: %v, want it refused for a missing right", statement, err)
		}
	}
}
