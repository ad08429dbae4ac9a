package test

import (
	"encoding/json"
	"fmt"
	"net/url"
	"regexp"
	"slices"
	"strings"
	"testing"

	"outbox-relay/internal/testenv"
)

// finding is one of `outbox-relay doctor --json`.
type finding struct{ Check, Level, Text, Mend string }

// doctor runs doctor and returns what it found. Its exit code must be 4 if and only if it found faults.
func doctor(t *testing.T, env ...string) []finding {
	t.Helper()
	code, stdout, stderr := testenv.Command(t, env, "doctor", "--json")
	var report struct {
		Faults   int
		Findings []finding
	}
	if err := json.Unmarshal([]byte(stdout), &report); err != nil {
		t.Fatalf("doctor: exit code %d, %v\n%s%s", code, err, stdout, stderr)
	}
	faults, documented := 0, documentedChecks(t)
	for _, f := range report.Findings {
		if !slices.Contains(documented, f.Check) {
			t.Errorf("docs/commands.md knows no check %s: %+v", f.Check, f)
		}
		if f.Level == "fault" {
			faults++
		}
		if strings.Contains(f.Text+f.Mend, "secret-word") {
			t.Errorf("shows a password: %+v", f)
		}
	}
	if want := map[bool]int{true: 4, false: 0}[faults > 0]; code != want || faults != report.Faults {
		t.Errorf("doctor: exit code %d and %d faults, for %d faults", code, report.Faults, faults)
	}
	return report.Findings
}

func (o *outbox) doctor(t *testing.T, env ...string) []finding {
	t.Helper()
	return doctor(t, append([]string{"DATABASE_URL=" + o.dsn, "AMQP_URL=" + o.amqpURL}, env...)...)
}

// wantFinding fails the test unless one of the findings is of this check and level and says these things,
// of which the last is how to mend it.
func wantFinding(t *testing.T, all []finding, check, level string, parts ...string) {
	t.Helper()
	for _, f := range all {
		if f.Check != check || f.Level != level {
			continue
		}
		if !slices.ContainsFunc(parts, func(part string) bool { return !strings.Contains(f.Text+" -> "+f.Mend, part) }) {
			return
		}
	}
	t.Errorf("no %s on %s that says %q, in\n%s", level, check, parts, lines(all))
}

func lines(all []finding) string {
	var b strings.Builder
	for _, f := range all {
		b.WriteString(f.Level + " " + f.Check + ": " + f.Text + " -> " + f.Mend + "\n")
	}
	return b.String()
}

// documentedChecks are the names of doctor's checks in docs/commands.md.
func documentedChecks(t *testing.T) (names []string) {
	t.Helper()
	_, text, _ := strings.Cut(readFile(t, "../docs/commands.md"), "\n| check | what |\n")
	text, _, _ = strings.Cut(text, "\n\n")
	for _, row := range regexp.MustCompile(`(?m)^\| ([a-z, -]+) \|`).FindAllStringSubmatch(text, -1) {
		if strings.Trim(row[1], "-") != "" { // the line under the header
			names = append(names, strings.Split(row[1], ", ")...)
		}
	}
	return names
}

// Each check that the docs name says that all is well.
func TestDoctorFindsNothingWrongWhereNothingIs(t *testing.T) {
	t.Parallel()
	owned := newOutbox(t)
	_, o := owned.withRoles(t)
	testenv.Consume(t, o.amqpURL, exchange)
	first := o.start(t)
	waitLeader(t, first, true)
	o.start(t).Ready(t)
	o.waitStatus(t, "both relays are well", func(s status) bool {
		return len(s.Relays) == 2 && s.Relays[0].Listening && s.Relays[1].Broker
	})
	found := o.doctor(t)
	for _, name := range documentedChecks(t) {
		if !slices.ContainsFunc(found, func(f finding) bool { return f.Check == name }) {
			t.Errorf("no line on %s in\n%s", name, lines(found))
		}
	}
	for _, f := range found {
		switch {
		case f.Level == "ok":
		case f.Check == "snapshots": // other tests share the server
		default:
			t.Errorf("%+v", f)
		}
	}
	_, table, _ := testenv.Command(t, []string{"DATABASE_URL=" + o.dsn, "AMQP_URL=" + o.amqpURL}, "doctor")
	wantReason(t, "doctor", table, "ok       schema", "ok       listen", "RabbitMQ 4", "stands by: pid")
}

// Doctor may be run at any time on a system that works: it must not put a message into a queue, take a
// lock or make an exchange.
func TestDoctorChangesNothing(t *testing.T) {
	t.Parallel()
	o := newOutbox(t)
	wantFinding(t, o.doctor(t), "bindings", "ok", "no pending or dead event was returned", "rabbitmqctl list_bindings")
	ch := o.channel(t)
	if err := ch.ExchangeDeclarePassive(exchange, "topic", true, false, false, false, nil); err == nil {
		t.Error("doctor has declared the exchange")
	}
	q := testenv.Consume(t, o.amqpURL, exchange)
	id := o.insert(t, event{})[0]
	wantFinding(t, o.doctor(t), "exchange", "ok", "may be written to")
	o.start(t)
	if d := q.Collect(t, 1, patience)[0]; d.MessageId != id {
		t.Errorf("doctor has published a message: %q", d.RoutingKey)
	}
}

func TestDoctorFindsWhatIsWrongInTheDatabase(t *testing.T) {
	t.Parallel()
	const insert = "INSERT INTO outbox_events (aggregate_type, aggregate_id, event_type, payload"
	for _, tt := range []struct {
		name, broken string
		check, level string
		parts        []string
	}{
		{"no index", "DROP INDEX outbox_events_fresh", "schema", "fault", []string{"build index outbox_events_fresh", "outbox-relay migrate"}},
		{"claims without index", "DROP INDEX outbox_events_fresh", "claim", "fault", []string{"read the whole table", "outbox-relay migrate"}},
		{"no trigger", "DROP TRIGGER outbox_notify ON outbox_events", "schema", "fault", []string{"create trigger outbox_notify", "outbox-relay migrate"}},
		{"older function", "CREATE OR REPLACE FUNCTION outbox_notify() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN RETURN NULL; END'", "schema", "fault", []string{"outbox_notify", "outbox-relay migrate"}},
		{"trigger disabled", "ALTER TABLE outbox_events DISABLE TRIGGER outbox_notify", "trigger", "fault", []string{"disabled", "ENABLE TRIGGER outbox_notify"}},
		{"trigger for replicas", "ALTER TABLE outbox_events ENABLE REPLICA TRIGGER outbox_notify", "trigger", "fault", []string{"replicated rows only", "ENABLE ALWAYS"}},
		{"cached sequence", "ALTER TABLE outbox_events ALTER seq SET CACHE 50", "seq", "fault", []string{"cache of 50", "SET CACHE 1"}},
		{"no autovacuum", "ALTER TABLE outbox_events SET (autovacuum_enabled = false)", "vacuum", "fault", []string{"switched off", "RESET (autovacuum_enabled)"}},
		{"no table", "DROP VIEW outbox_dead_letters; DROP TABLE outbox_events", "schema", "fault", []string{"create table outbox_events", "outbox-relay migrate"}},
		{"another table of that name", "DROP VIEW outbox_dead_letters; DROP TABLE outbox_events; CREATE TABLE outbox_events (id int)", "schema", "fault", []string{"not an outbox of ours: column id is integer, not uuid; it has no columns aggregate_type, aggregate_id, event_type, payload, attempts, created_at, processed_at. Nothing is changed", "search_path"}},
		{"no relay", "SELECT 1", "relay", "fault", []string{"no relay works", "outbox-relay run"}},
		{"paused", "UPDATE outbox_relay_state SET paused_at = now(), paused_by = 'somebody'", "paused", "warning", []string{"by somebody", "outbox-relay resume"}},
		{"old events", insert + ", created_at) VALUES ('order', '1', 'x', '{}', now() - interval '1 hour')", "backlog", "warning", []string{"1 pending event, the oldest for 1h", "outbox-relay status"}},
		{"dead letters", insert + ", dead_at) VALUES ('order', '1', 'x', '{}', now())", "dead-letters", "warning", []string{"1 event given up", "outbox-relay dead-letters list"}},
		{"held aggregates", insert + ", retry_after) VALUES ('order', '1', 'x', '{}', now())", "held", "warning", []string{"1 aggregate held back", "outbox-relay status"}},
		{"returned events", insert + ", retry_after, last_error) VALUES ('order', '1', 'x', '{}', now(), 'returned: no queue for x')", "failures", "warning", []string{"1 event returned: no queue for x", "bind a queue"}},
		{"rejected events", insert + ", dead_at, last_error) VALUES ('order', '1', 'x', '{}', now(), 'rejected: too large')", "failures", "warning", []string{"1 event rejected: too large", "outbox-relay dead-letters list"}},
		{"events returned for several keys", insert + `, retry_after, last_error) SELECT 'order', n::text, 'x', '{}', now(), 'returned: no queue for ' || n
			FROM generate_series(1, 3) n`, "failures", "warning", []string{"3 events returned in 3 different words, for example: no queue for 1", "bind a queue"}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			o := newOutbox(t)
			testenv.Exec(t, o.dsn, tt.broken)
			wantFinding(t, o.doctor(t), tt.check, tt.level, tt.parts...)
		})
	}
}

// Sessions that are in the way, named so that they can be ended.
func TestDoctorNamesSessionsInTheWay(t *testing.T) {
	t.Parallel()
	o := newOutbox(t)
	key := testenv.Value[int64](t, o.dsn, "SELECT 'outbox_events'::regclass::oid::bigint")
	conn, err := o.db.Conn(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	var pid string
	if err := conn.QueryRowContext(t.Context(), "SELECT pg_backend_pid()::text").Scan(&pid); err != nil {
		t.Fatal(err)
	}
	const workLock = 0x6f77726b
	if _, err := conn.ExecContext(t.Context(), "SELECT pg_advisory_lock($1::int, $2::bigint::int)", workLock, key); err != nil {
		t.Fatal(err)
	}
	wantFinding(t, o.doctor(t), "relay", "fault", "pid "+pid, "does not look like a relay", "pg_terminate_backend("+pid+")")

	if testenv.Value[int](t, o.dsn, "SELECT current_setting('max_prepared_transactions')::int") == 0 {
		t.Log("max_prepared_transactions is 0: left out PREPARE TRANSACTION")
		return
	}
	testenv.Exec(t, o.dsn, `BEGIN; INSERT INTO outbox_events (aggregate_type, aggregate_id, event_type, payload) VALUES ('order', '1', 'x', '{}');
		PREPARE TRANSACTION '`+t.Name()+`'`)
	t.Cleanup(func() { testenv.Exec(t, o.dsn, "ROLLBACK PREPARED '"+t.Name()+"'") })
	wantFinding(t, o.doctor(t), "doorbell", "fault", "prepared transaction", "outbox.notify = 'off'")
}

func TestDoctorFindsMissingRights(t *testing.T) {
	t.Parallel()
	o := newOutbox(t)
	const name = "doctor_few_rights"
	testenv.Exec(t, o.dsn, "CREATE ROLE "+name+` LOGIN PASSWORD 'secret-word' CONNECTION LIMIT 5;
		GRANT SELECT ON outbox_events, outbox_relay_state TO `+name)
	t.Cleanup(func() { testenv.Exec(t, o.dsn, "DROP OWNED BY "+name+"; DROP ROLE "+name) })
	u, err := url.Parse(o.dsn)
	if err != nil {
		t.Fatal(err)
	}
	u.User = url.UserPassword(name, "secret-word")
	got := doctor(t, "DATABASE_URL="+u.String(), "AMQP_URL="+o.amqpURL)
	wantFinding(t, got, "rights", "fault", "lacks SELECT ON outbox_dead_letters; ",
		"; DELETE, UPDATE (attempts, dead_at, last_error, processed_at, retry_after) ON outbox_events; ",
		"; DELETE, INSERT, SELECT, UPDATE ON outbox_suspects", "GRANT outbox_relay TO \""+name)
	wantFinding(t, got, "connections", "warning", "5 connections", "CONNECTION LIMIT")
	wantFinding(t, got, "schema", "ok")

	// A role with no right at all lacks rights: nothing else is at fault, and each line says it once.
	testenv.Exec(t, o.dsn, "REVOKE ALL ON outbox_events, outbox_relay_state FROM "+name)
	got = doctor(t, "DATABASE_URL="+u.String(), "AMQP_URL="+o.amqpURL)
	for _, f := range got {
		if f.Level == "fault" && f.Check != "rights" {
			t.Errorf("for want of a right: %+v", f)
		}
	}
	for _, check := range []string{"schema", "claim", "relay"} {
		wantFinding(t, got, check, "unknown", "could not be checked for want of a right: ", "see the finding on rights")
	}
}

// Rights over what roles.sql gives are no fault, and are told: those of the relay's own login, and those of
// logins that insert events.
func TestDoctorFindsTooManyRights(t *testing.T) {
	t.Parallel()
	o := newOutbox(t)
	app, relay := o.withRoles(t)
	name := parse(t, app.dsn).User.Username()
	wantFinding(t, o.doctor(t), "rights", "warning", "is a superuser", "roles.sql")
	wantFinding(t, relay.doctor(t), "rights", "ok", "has what the relay needs")
	for _, f := range relay.doctor(t) {
		if f.Check == "rights" && f.Level != "ok" {
			t.Errorf("with the rights of roles.sql: %+v", f)
		}
	}
	testenv.Exec(t, o.dsn, fmt.Sprintf("GRANT SELECT, UPDATE (payload), DELETE ON outbox_events TO %s", name))
	wantFinding(t, relay.doctor(t), "rights", "warning", "role "+name+" may INSERT", "and also SELECT, UPDATE, DELETE", "REVOKE", "GRANT outbox_app TO")
	owner := parse(t, relay.dsn).User.Username()
	testenv.Exec(t, o.dsn, fmt.Sprintf("ALTER TABLE outbox_events OWNER TO %[1]s; ALTER TABLE outbox_relay_state OWNER TO %[1]s", owner))
	t.Cleanup(func() { testenv.Exec(t, o.dsn, "REASSIGN OWNED BY "+owner+" TO CURRENT_USER") })
	wantFinding(t, relay.doctor(t), "rights", "warning", "may act as the owner of outbox_events", "roles.sql")
}

func TestDoctorWithoutServers(t *testing.T) {
	t.Parallel()
	got := doctor(t, "DATABASE_URL=postgres://relay:secret-word@127.0.0.1:1/shop?sslmode=disable", "AMQP_URL=amqp://relay:secret-word@127.0.0.1:1/")
	wantFinding(t, got, "postgres", "fault", "connect to PostgreSQL", "refused", "DATABASE_URL")
	wantFinding(t, got, "rabbitmq", "fault", "connect to amqp://relay@127.0.0.1:1/", "refused", "AMQP_URL")
	wantFinding(t, got, "settings", "ok")
}

func TestDoctorFindsWhatIsWrongWithTheBroker(t *testing.T) {
	t.Parallel()
	o := newOutbox(t)
	q := testenv.Consume(t, o.amqpURL, exchange) // makes the exchange
	wantFinding(t, o.doctor(t), "exchange", "ok", "may be written to")
	wantFinding(t, o.doctor(t, "AMQP_EXCHANGE=other"), "exchange", "warning", `"other" is not there yet`)
	wantFinding(t, o.doctor(t, "AMQP_EXCHANGE=other", "AMQP_DECLARE=false"), "exchange", "fault", `"other" is not there`, "AMQP_DECLARE=true")
	wantFinding(t, o.doctor(t, "AMQP_EXCHANGE_TYPE=direct"), "exchange", "fault", "of another type", "AMQP_EXCHANGE_TYPE")
	wantFinding(t, o.doctor(t, "AMQP_EXCHANGE={aggregate_type}"), "exchange", "unknown", "template")
	wantFinding(t, o.doctor(t, "AMQP_URL=amqp://nobody:secret-word@127.0.0.1:1/,"+o.amqpURL), "rabbitmq", "warning", "nobody@127.0.0.1:1")
	if n := len(q.Received()); n != 0 {
		t.Errorf("doctor has published %d messages", n)
	}
}

func TestDoctorFindsABlockedBrokerAndAMissingRight(t *testing.T) {
	t.Parallel()
	broker := testenv.OwnRabbitMQ(t, testenv.Options{})
	o := outboxOn(t, testenv.Database(t), broker.URL)
	testenv.Consume(t, o.amqpURL, exchange)
	broker.Ctl(t, "add_user", "reader", "secret-word")
	broker.Ctl(t, "set_permissions", "reader", "^$", "^$", ".*")
	u, err := url.Parse(broker.URL)
	if err != nil {
		t.Fatal(err)
	}
	u.User = url.UserPassword("reader", "secret-word")
	wantFinding(t, o.doctor(t, "AMQP_URL="+u.String()), "exchange", "fault", "may not declare", "set_permissions")
	wantFinding(t, o.doctor(t, "AMQP_URL="+u.String(), "AMQP_DECLARE=false"), "exchange", "fault", "may not write", "set_permissions")

	broker.Ctl(t, "set_vm_memory_high_watermark", "absolute", "1")
	testenv.Eventually(t, patience, "doctor sees that the broker is blocked", func() bool {
		return slices.ContainsFunc(o.doctor(t), func(f finding) bool {
			return f.Check == "exchange" && f.Level == "fault" && strings.Contains(f.Text, "blocked: low on memory")
		})
	})
}

func TestDoctorPointsOutSettings(t *testing.T) {
	t.Parallel()
	const nowhere = "DATABASE_URL=postgres://relay@127.0.0.1:1/shop"
	for _, tt := range []struct {
		setting string
		parts   []string
	}{
		{"CONFIRM_TIMEOUT=7s", []string{"less than CONFIRM_TIMEOUT", "raise SHUTDOWN_TIMEOUT"}},
		{"SHUTDOWN_TIMEOUT=30s", []string{"Docker grants", "lower SHUTDOWN_TIMEOUT"}},
		{"AMQP_MANDATORY=false", []string{"lost in silence", "AMQP_MANDATORY=true"}},
		{"MAX_ATTEMPTS=2", []string{"dead letter after about", "raise MAX_ATTEMPTS"}},
		{"BATCHSIZE=10", []string{"did you mean BATCH_SIZE"}},
	} {
		got := doctor(t, nowhere, "AMQP_URL=amqp://relay@127.0.0.1:1/", tt.setting)
		wantFinding(t, got, "settings", "warning", tt.parts...)
	}
	code, _, stderr := testenv.Command(t, []string{nowhere, "RETRY_BASE=1h", "BATCH_SIZE=0"}, "doctor")
	if code != 2 {
		t.Errorf("exit code %d, want 2", code)
	}
	wantReason(t, "faulty settings", stderr, "AMQP_URL: not set", "RETRY_BASE: 1h0m0s is over RETRY_MAX", "BATCH_SIZE: 0 is not from 1")
}
