package main

import (
	"context"
	"database/sql"
	"fmt"
	"os"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/lib/pq"

	"outbox-relay/internal/migrate"
	"outbox-relay/internal/testenv"
	sqlfiles "outbox-relay/sql"
)

func TestTriggerRingsWhileTheRelaySleeps(t *testing.T) {
	dsn, db := testenv.OpenDatabase(t)
	testenv.MustExec(t, db, sqlfiles.Schema)
	oid := tableOID(t, db)
	heard := listenForRings(t, dsn)

	sleeping := testenv.Begin(t, db, fmt.Sprintf("SELECT pg_advisory_xact_lock(%d, %d)", sqlfiles.DoorbellLockClass, sqlfiles.LockKey(oid)))
	testenv.InsertEvent(t, db)
	if got := heard(); !slices.Equal(got, []string{fmt.Sprint(oid)}) {
		t.Errorf("rings = %q, want one with the table's oid %d", got, oid)
	}
	testenv.MustExec(t, db, `INSERT INTO outbox_events (aggregate_type, aggregate_id, event_type, payload)
		SELECT 'order', '1', 'order.created', '{}' FROM generate_series(1, 10000)`)
	if got := heard(); len(got) != 1 {
		t.Errorf("rings after 10,000 rows in one statement = %d, want 1", len(got))
	}
	rolledBack := testenv.Begin(t, db, "SELECT 1")
	testenv.InsertEvent(t, rolledBack)
	if err := rolledBack.Rollback(); err != nil {
		t.Fatal(err)
	}
	if got := heard(); len(got) != 0 {
		t.Errorf("rings after a rollback = %q, want none", got)
	}
	if err := sleeping.Rollback(); err != nil {
		t.Fatal(err)
	}
}

func TestTriggerIsSilentWhileTheRelayIsAwake(t *testing.T) {
	dsn, db := testenv.OpenDatabase(t)
	testenv.MustExec(t, db, sqlfiles.Schema)
	heard := listenForRings(t, dsn)
	tryLock := fmt.Sprintf("SELECT pg_try_advisory_xact_lock(%d, %d)::int", sqlfiles.DoorbellLockClass, sqlfiles.LockKey(tableOID(t, db)))

	writer := testenv.Begin(t, db, "SELECT 1")
	testenv.InsertEvent(t, writer)
	if got := testenv.QueryInt(t, db, tryLock); got != 0 {
		t.Error("the relay could fall asleep while a silent writer had yet to commit")
	}
	// What a savepoint undoes leaves no lock of its own behind.
	testenv.MustExec(t, writer, "SAVEPOINT s")
	testenv.InsertEvent(t, writer)
	testenv.MustExec(t, writer, "ROLLBACK TO SAVEPOINT s")
	if err := writer.Commit(); err != nil {
		t.Fatal(err)
	}
	if got := testenv.QueryInt(t, db, tryLock); got != 1 {
		t.Error("the doorbell lock outlived the writer")
	}
	if got := heard(); len(got) != 0 {
		t.Errorf("rings = %q, want none", got)
	}
}

func TestTriggerSwitchedOff(t *testing.T) {
	dsn, db := testenv.OpenDatabase(t)
	testenv.MustExec(t, db, sqlfiles.Schema)
	heard := listenForRings(t, dsn)
	lock := fmt.Sprintf("SELECT pg_advisory_xact_lock(%d, %d)", sqlfiles.DoorbellLockClass, sqlfiles.LockKey(tableOID(t, db)))

	for _, relay := range []string{"awake", "asleep"} {
		statement := "SELECT 1"
		if relay == "asleep" {
			statement = lock
		}
		relayTx := testenv.Begin(t, db, statement)
		writer := testenv.Begin(t, db, "SET LOCAL outbox.notify = 'off'")
		testenv.InsertEvent(t, writer)
		const locks = "SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND pid = pg_backend_pid()"
		if got := testenv.QueryInt(t, writer, locks); got != 0 {
			t.Errorf("relay %s: locks held by the writer = %d, want none", relay, got)
		}
		if testenv.QueryInt(t, db, "SELECT current_setting('max_prepared_transactions')::int") == 0 {
			t.Log("max_prepared_transactions is 0: left out PREPARE TRANSACTION")
		} else {
			testenv.MustExec(t, writer, "PREPARE TRANSACTION 'outbox test "+relay+"'")
			testenv.MustExec(t, db, "COMMIT PREPARED 'outbox test "+relay+"'")
		}
		_ = writer.Commit() // a prepared one is over already
		if got := heard(); len(got) != 0 {
			t.Errorf("relay %s: rings = %q, want none", relay, got)
		}
		if err := relayTx.Rollback(); err != nil {
			t.Fatal(err)
		}
	}
	if got := testenv.QueryInt(t, db, "SELECT count(*) FROM outbox_events"); got != 2 {
		t.Errorf("events = %d, want 2", got)
	}

	// SET LOCAL leaves an empty setting behind in its session, which is not "off".
	relayTx := testenv.Begin(t, db, lock)
	conn, err := db.Conn(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	for _, statement := range []string{"BEGIN; SET LOCAL outbox.notify = 'off'; COMMIT", testenv.InsertEventSQL} {
		if _, err := conn.ExecContext(t.Context(), statement); err != nil {
			t.Fatal(err)
		}
	}
	if got := heard(); len(got) != 1 {
		t.Errorf("rings after the switch = %d, want 1", len(got))
	}
	_ = relayTx.Rollback()
}

func TestTriggersOfTwoOutboxesInOneDatabase(t *testing.T) {
	dsn, db := testenv.OpenDatabase(t)
	testenv.MustExec(t, db, "CREATE SCHEMA shop; CREATE SCHEMA bank")
	migrated(t, testenv.WithParameter(t, dsn, "search_path", "shop"))
	migrated(t, testenv.WithParameter(t, dsn, "search_path", "bank"))
	heard := listenForRings(t, dsn)
	shop := testenv.QueryInt(t, db, "SELECT 'shop.outbox_events'::regclass::oid::bigint")

	// The relay of shop sleeps, that of bank is awake.
	testenv.Begin(t, db, fmt.Sprintf("SELECT pg_advisory_xact_lock(%d, %d)", sqlfiles.DoorbellLockClass, sqlfiles.LockKey(uint32(shop))))
	for _, schema := range []string{"shop", "bank"} {
		testenv.MustExec(t, db, strings.Replace(testenv.InsertEventSQL, "outbox_events", schema+".outbox_events", 1))
	}
	if got := heard(); !slices.Equal(got, []string{strconv.Itoa(shop)}) {
		t.Errorf("rings = %q, want only that of shop's table %d", got, shop)
	}
}

func TestLockKeyIsTheServersCast(t *testing.T) {
	_, db := testenv.OpenDatabase(t)
	for _, oid := range []uint32{1, 16384, 1<<31 - 1, 1 << 31, 3_000_000_000, 1<<32 - 1} {
		if got, want := testenv.QueryInt(t, db, "SELECT $1::bigint::oid::int4", int64(oid)), int(sqlfiles.LockKey(oid)); got != want {
			t.Errorf("oid %d: the server says %d, LockKey %d", oid, got, want)
		}
	}
}

func TestRolesHaveTheRightsTheyNeed(t *testing.T) {
	dsn, db := testenv.OpenDatabase(t)
	migrated(t, dsn)
	// Roles belong to the whole server: the test takes names of its own.
	app, relay := testenv.Role(t, db), testenv.Role(t, db)
	roles := strings.NewReplacer("outbox_app", app, "outbox_relay_state", "outbox_relay_state", "outbox_relay", relay).
		Replace(readSQL(t, "roles.sql"))
	for range 2 {
		testenv.MustExec(t, db, roles)
	}

	const insert = testenv.InsertEventSQL
	for _, tc := range []struct {
		role, statement string
		allowed         bool
	}{
		{app, insert, true},
		{app, insert + " RETURNING id", true},
		{app, "INSERT INTO outbox_events (id, aggregate_type, aggregate_id, event_type, payload, headers) VALUES (gen_random_uuid(), 'order', '1', 'order.created', '{}', '{}') ON CONFLICT (id) DO NOTHING", true},
		{app, "SELECT payload FROM outbox_events", false},
		{app, "SELECT id, seq FROM outbox_events", false},
		{app, "UPDATE outbox_events SET processed_at = now()", false},
		{app, "DELETE FROM outbox_events", false},
		{app, "INSERT INTO outbox_events (aggregate_type, aggregate_id, event_type, payload, attempts) VALUES ('order', '1', 'order.created', '{}', 3)", false},
		{app, "SELECT * FROM outbox_relay_state", false},
		{relay, "SELECT * FROM outbox_events WHERE processed_at IS NULL FOR UPDATE SKIP LOCKED", true},
		{relay, "SELECT * FROM outbox_dead_letters", true},
		{relay, "UPDATE outbox_events SET processed_at = now(), attempts = attempts + 1, retry_after = now(), last_error = '', dead_at = NULL", true},
		{relay, "DELETE FROM outbox_events WHERE processed_at < now()", true},
		{relay, "UPDATE outbox_relay_state SET leader = 'me', leader_since = now(), clean = false, deaths = 1, paused_at = NULL, paused_by = NULL, last_error = '', last_error_at = now()", true},
		{relay, "INSERT INTO outbox_suspects (id, deaths, claimed_at) VALUES (gen_random_uuid(), 1, now()) ON CONFLICT (id) DO UPDATE SET deaths = outbox_suspects.deaths + 1", true},
		{relay, "DELETE FROM outbox_suspects", true},
		{relay, "LISTEN outbox_event", true},
		{relay, fmt.Sprintf("SELECT pg_try_advisory_lock(%d, 1), pg_notify('outbox_event', '')", sqlfiles.WorkLockClass), true},
		{relay, "SELECT pid, usename, application_name FROM pg_stat_activity", true},
		{relay, insert, false},
		{relay, "UPDATE outbox_events SET payload = '{}'", false},
		{relay, "TRUNCATE outbox_events", false},
		{relay, "DELETE FROM outbox_relay_state", false},
	} {
		tx := testenv.Begin(t, db, "SET LOCAL ROLE "+tc.role)
		_, err := tx.Exec(tc.statement)
		_ = tx.Rollback()
		if allowed := err == nil; allowed != tc.allowed {
			t.Errorf("%s: allowed = %v, want %v: %v", tc.statement, allowed, tc.allowed, err)
		}
	}
	// What the relay itself runs. EXPLAIN checks the rights and changes nothing.
	tx := testenv.Begin(t, db, "SET LOCAL ROLE "+relay)
	for _, yes := range []bool{true, false} {
		explainAny(t, tx, sqlfiles.Claim(yes, yes, "jsonb"))
		explainAny(t, tx, sqlfiles.Settle(true, yes))
		explainAny(t, tx, sqlfiles.Settle(false, yes))
	}
	explainAny(t, tx, sqlfiles.Backlog)
	testenv.MustExec(t, tx, sqlfiles.Session("setup"))
	for file, statement := range map[string]func(name string) string{
		"session.sql": func(name string) string {
			return sqlfiles.SessionLock(name, sqlfiles.WorkLockClass, tableOID(t, db))
		},
		"operator.sql":     sqlfiles.Operator,
		"status.sql":       sqlfiles.Status,
		"doctor.sql":       sqlfiles.Doctor,
		"dead_letters.sql": sqlfiles.DeadLetters,
		"replay.sql":       func(name string) string { return sqlfiles.Replay(name, "jsonb") },
	} {
		for _, name := range sections(t, file) {
			if s := statement(name); regexp.MustCompile(`(?m)^(SELECT|WITH|INSERT|UPDATE|DELETE) `).MatchString(s) {
				explainAny(t, tx, s)
			}
		}
	}
	explainAny(t, tx, sqlfiles.Retention("table"))
	explainAny(t, tx, sqlfiles.Retention("delete"))
	if err := tx.Rollback(); err != nil {
		t.Fatal(err)
	}
	if pending, err := migrate.Pending(t.Context(), testenv.AsRole(t, dsn, relay)); err != nil || len(pending) > 0 {
		t.Errorf("migrate would %q, %v", pending, err)
	}
}

func TestQueriesArePreparedAndUseTheirIndexes(t *testing.T) {
	_, db := testenv.OpenDatabase(t)
	testenv.MustExec(t, db, sqlfiles.Schema)
	testenv.MustExec(t, db, `INSERT INTO outbox_events (aggregate_type, aggregate_id, event_type, payload, processed_at, retry_after, dead_at)
		SELECT 'order', (i % 1000)::text, 'order.created', '{}',
		       CASE WHEN i % 100 > 5 THEN now() END,
		       CASE WHEN i % 100 IN (1, 2) THEN now() END,
		       CASE WHEN i % 100 = 2 THEN now() END
		FROM generate_series(1, 100000) i`)
	testenv.MustExec(t, db, "ANALYZE outbox_events")

	tx := testenv.Begin(t, db, "SELECT 1") // one session
	plans := map[string]string{
		"InsertEvent":     "NULL, NULL, NULL, NULL, NULL",
		"FetchBatch":      "100",
		"FetchDueRetries": "100",
		"MarkProcessed":   "'{}'",
		"MarkFailed":      "gen_random_uuid(), 'x', 1, 300, 10",
		"CountPending":    "",
		"ListDeadLetters": "100",
		"RetryDeadLetter": "gen_random_uuid()",
	}
	indexes := map[string][]string{
		"FetchBatch":      {"outbox_events_fresh"},
		"FetchDueRetries": {"outbox_events_retry"},
		"MarkProcessed":   {"outbox_events_pkey"},
		"MarkFailed":      {"outbox_events_pkey"},
		"CountPending":    {"outbox_events_fresh", "outbox_events_retry"},
		"ListDeadLetters": {"outbox_events_blocking"},
		"RetryDeadLetter": {"outbox_events_pkey"},
	}
	query := regexp.MustCompile(`(?m)^-- name: (\w+) :\w+\n`)
	text := readSQL(t, "queries.sql")
	found := query.FindAllStringSubmatchIndex(text, -1)
	if len(found) != len(plans) {
		t.Errorf("queries = %d, want %d", len(found), len(plans))
	}
	for i, at := range found {
		end := len(text)
		if i+1 < len(found) {
			end = found[i+1][0]
		}
		name := text[at[2]:at[3]]
		testenv.MustExec(t, tx, fmt.Sprintf("PREPARE %s AS %s", name, text[at[1]:end]))
		args := plans[name]
		if args != "" {
			args = "(" + args + ")"
		}
		plan := explain(t, tx, "EXECUTE "+name+args)
		for _, index := range indexes[name] {
			if !strings.Contains(plan, index) {
				t.Errorf("%s does not use %s:\n%s", name, index, plan)
			}
		}
		if strings.Contains(plan, "Seq Scan") {
			t.Errorf("%s reads the whole table:\n%s", name, plan)
		}
	}
}

func TestQueriesDoWhatTheySay(t *testing.T) {
	_, db := testenv.OpenDatabase(t)
	testenv.MustExec(t, db, sqlfiles.Schema)
	tx := testenv.Begin(t, db, "SELECT 1")
	text := readSQL(t, "queries.sql")
	for _, part := range strings.Split(text, "-- name: ")[1:] {
		name, _, _ := strings.Cut(part, " ")
		_, body, _ := strings.Cut(part, "\n")
		testenv.MustExec(t, tx, fmt.Sprintf("PREPARE %s AS %s", name, body))
	}
	testenv.InsertEvent(t, tx)
	if got := testenv.QueryInt(t, tx, "EXECUTE CountPending"); got != 1 {
		t.Errorf("pending = %d, want 1", got)
	}
	var id string
	if err := tx.QueryRow("SELECT id FROM outbox_events").Scan(&id); err != nil {
		t.Fatal(err)
	}
	const retryIn = "SELECT extract(epoch FROM retry_after - now())::int FROM outbox_events"
	for attempt, want := range []int{1, 2, 4, 5, 5} {
		testenv.MustExec(t, tx, fmt.Sprintf("EXECUTE MarkFailed('%s', 'no queue', 1, 5, 6)", id))
		if got := testenv.QueryInt(t, tx, retryIn); got != want {
			t.Errorf("retry %d in %d s, want %d", attempt+1, got, want)
		}
	}
	if got := testenv.QueryInt(t, tx, "SELECT count(*) FROM outbox_dead_letters"); got != 0 {
		t.Error("dead before its last attempt")
	}
	testenv.MustExec(t, tx, fmt.Sprintf("EXECUTE MarkFailed('%s', 'no queue', 1, 5, 6)", id))
	if got := testenv.QueryInt(t, tx, "SELECT count(*) FROM outbox_dead_letters WHERE attempts = 6 AND last_error = 'no queue'"); got != 1 {
		t.Error("not dead after its last attempt")
	}
	if got := testenv.QueryInt(t, tx, "EXECUTE CountPending"); got != 0 {
		t.Errorf("pending = %d, want 0", got)
	}
	testenv.MustExec(t, tx, fmt.Sprintf("EXECUTE RetryDeadLetter('%s')", id))
	var fetched string
	if err := tx.QueryRow("SELECT id FROM outbox_events WHERE attempts = 0 AND retry_after IS NULL AND last_error IS NULL").Scan(&fetched); err != nil {
		t.Errorf("a dead letter that is retried does not start again: %v", err)
	}
	testenv.MustExec(t, tx, fmt.Sprintf("EXECUTE MarkProcessed('{%s}')", id))
	if got := testenv.QueryInt(t, tx, "EXECUTE CountPending"); got != 0 {
		t.Errorf("pending = %d, want 0", got)
	}
}

func TestConsumerHasItsEffectOnce(t *testing.T) {
	_, db := testenv.OpenDatabase(t)
	for range 2 {
		testenv.MustExec(t, db, readSQL(t, "consumer.sql"))
	}
	testenv.MustExec(t, db, "CREATE TABLE effects (id UUID)")
	const id = "0193a0f0-0000-7000-8000-000000000001"
	consume := func(ctx context.Context, tx *sql.Tx) (effect bool, err error) {
		res, err := tx.ExecContext(ctx, "INSERT INTO processed_events (message_id) VALUES ($1) ON CONFLICT DO NOTHING", id)
		if err != nil {
			return false, err
		}
		if n, err := res.RowsAffected(); n == 0 || err != nil {
			return false, err
		}
		_, err = tx.ExecContext(ctx, "INSERT INTO effects VALUES ($1)", id)
		return true, err
	}

	// The first delivery fails while the second is waiting for it: then the second has the effect.
	first := testenv.Begin(t, db, "SELECT 1")
	if effect, err := consume(t.Context(), first); err != nil || !effect {
		t.Fatalf("first delivery: effect %v, %v", effect, err)
	}
	second := testenv.Begin(t, db, "SELECT 1")
	done := make(chan error, 1)
	go func() {
		effect, err := consume(t.Context(), second)
		if err == nil && !effect {
			err = fmt.Errorf("the second delivery was dropped though the first was rolled back")
		}
		done <- err
	}()
	testenv.Until(t, func() bool {
		return testenv.QueryInt(t, db, "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND wait_event = 'transactionid'") > 0
	})
	if err := first.Rollback(); err != nil {
		t.Fatal(err)
	}
	if err := <-done; err != nil {
		t.Fatal(err)
	}
	if err := second.Commit(); err != nil {
		t.Fatal(err)
	}
	third := testenv.Begin(t, db, "SELECT 1")
	if effect, err := consume(t.Context(), third); err != nil || effect {
		t.Errorf("third delivery: effect %v, %v; want none", effect, err)
	}
	if got := testenv.QueryInt(t, db, "SELECT count(*) FROM effects"); got != 1 {
		t.Errorf("effects = %d, want 1", got)
	}
}

// listenForRings listens as the relay does. The function it returns gives the payloads that came
// since it was last called.
func listenForRings(t *testing.T, dsn string) func() []string {
	t.Helper()
	l := pq.NewListener(dsn, time.Second, time.Second, nil)
	t.Cleanup(func() { _ = l.Close() })
	if err := l.Listen(sqlfiles.Channel); err != nil {
		t.Fatal(err)
	}
	db := testenv.DB(t, dsn)
	return func() (payloads []string) {
		// Notifications come in the order of their commits, so all of them are here before this one.
		testenv.MustExec(t, db, "SELECT pg_notify('"+sqlfiles.Channel+"', 'end')")
		for {
			select {
			case n := <-l.Notify:
				if n == nil {
					t.Fatal("the listener lost its connection")
				}
				if n.Extra == "end" {
					return payloads
				}
				payloads = append(payloads, n.Extra)
			case <-time.After(10 * time.Second):
				t.Fatal("no notification came in 10s")
			}
		}
	}
}

func tableOID(t *testing.T, q testenv.Querier) uint32 {
	t.Helper()
	return uint32(testenv.QueryInt(t, q, "SELECT 'outbox_events'::regclass::oid::bigint"))
}

func readSQL(t *testing.T, name string) string {
	t.Helper()
	text, err := os.ReadFile("sql/" + name)
	if err != nil {
		t.Fatal(err)
	}
	return string(text)
}

// sections returns the names of the statements in a file, parts of statements left out.
func sections(t *testing.T, file string) (names []string) {
	t.Helper()
	for _, m := range regexp.MustCompile(`(?m)^-- section: (.*)$`).FindAllStringSubmatch(readSQL(t, file), -1) {
		if m[1] != "matching" {
			names = append(names, m[1])
		}
	}
	return names
}

// explainAny explains a statement with NULL in place of its parameters.
func explainAny(t *testing.T, tx *sql.Tx, statement string) {
	t.Helper()
	explain(t, tx, regexp.MustCompile(`\$\d+`).ReplaceAllString(statement, "NULL"))
}

func explain(t *testing.T, tx *sql.Tx, statement string) string {
	t.Helper()
	rows, err := tx.Query("EXPLAIN (COSTS off) " + statement)
	if err != nil {
		t.Fatalf("%s: %v", statement, err)
	}
	defer rows.Close()
	var lines []string
	for rows.Next() {
		var line string
		if err := rows.Scan(&line); err != nil {
			t.Fatal(err)
		}
		lines = append(lines, line)
	}
	if err := rows.Err(); err != nil {
		t.Fatal(err)
	}
	return strings.Join(lines, "\n")
}
