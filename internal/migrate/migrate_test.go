package migrate

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"os"
	"regexp"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/lib/pq"

	"outbox-relay/internal/testenv"
	sqlfiles "outbox-relay/sql"
)

// impatient is for tests that wait for the end of somebody's patience.
var impatient = limits{lockTries: 2, lockPause: 10 * time.Millisecond, turn: time.Second, watch: 50 * time.Millisecond}

func TestMigrateMakesANewOutbox(t *testing.T) {
	dsn, db := testenv.OpenDatabase(t)

	out := migrated(t, dsn)
	for _, want := range []string{
		"created table outbox_events",
		"created index outbox_events_fresh",
		"created function and trigger outbox_notify",
		"created view outbox_dead_letters",
		"created tables outbox_relay_state and outbox_suspects",
		"schema is up to date",
	} {
		if !strings.Contains(out, want+"\n") {
			t.Errorf("output lacks %q:\n%s", want, out)
		}
	}
	if got := testenv.QueryInt(t, db, "SELECT count(*) FROM outbox_relay_state WHERE clean AND deaths = 0"); got != 1 {
		t.Errorf("rows in outbox_relay_state = %d, want 1", got)
	}
	if got := testenv.QueryInt(t, db, "SELECT count(*) FROM pg_index WHERE indrelid = 'outbox_events'::regclass"); got != 4 {
		t.Errorf("indexes of outbox_events = %d, want 4", got)
	}
	testenv.InsertEvent(t, db)
	assertNothingToDo(t, dsn)
}

func TestMigrateAgreesWithTheSchemaFile(t *testing.T) {
	dsn, db := testenv.OpenDatabase(t)
	for range 2 { // by hand, and twice
		testenv.MustExec(t, db, sqlfiles.Schema)
	}
	assertNothingToDo(t, dsn)
}

// A column that schema.sql has and migrate does not know would be missed by the relay, not by migrate.
func TestMigrateKnowsTheColumnsOfTheSchemaFile(t *testing.T) {
	_, db := testenv.OpenDatabase(t)
	testenv.MustExec(t, db, sqlfiles.Schema)
	for table, columns := range map[string][]wantedColumn{
		"outbox_events": eventColumns, "outbox_relay_state": stateColumns, "outbox_suspects": suspectColumns,
	} {
		var want []string
		for _, c := range columns {
			want = append(want, c.name)
		}
		slices.Sort(want)
		var have pq.StringArray
		err := db.QueryRow(`SELECT array_agg(attname::text ORDER BY attname::text COLLATE "C") FROM pg_attribute
			WHERE attrelid = $1::regclass AND attnum > 0 AND NOT attisdropped`, table).Scan(&have)
		if err != nil {
			t.Fatal(err)
		}
		if !slices.Equal(have, want) {
			t.Errorf("%s: schema.sql has %v, migrate knows %v", table, have, want)
		}
	}
}

func TestMigrateByTwoAtOnce(t *testing.T) {
	for name, setup := range map[string]string{"new": "SELECT 1", "older": olderSchema(t)} {
		t.Run(name, func(t *testing.T) {
			dsn, db := testenv.OpenDatabase(t)
			testenv.MustExec(t, db, setup)
			outs := make([]lineBuffer, 4)
			var wg sync.WaitGroup
			for i := range outs {
				wg.Go(func() {
					if err := Run(t.Context(), dsn, &outs[i]); err != nil {
						t.Errorf("migrate %d: %v\n%s", i, err, outs[i].String())
					}
				})
			}
			wg.Wait()
			acted := 0
			for i := range outs {
				if !strings.Contains(outs[i].String(), "nothing to do") {
					acted++
				}
			}
			if acted != 1 {
				t.Errorf("%d of %d found something to do, want 1", acted, len(outs))
			}
			assertNothingToDo(t, dsn)
		})
	}
}

func TestMigrateUpgradesAnOlderTableUnderTraffic(t *testing.T) {
	t.Parallel()
	dsn, db := testenv.OpenDatabase(t)
	testenv.MustExec(t, db, olderSchema(t))
	testenv.MustExec(t, db, `INSERT INTO outbox_events (aggregate_type, aggregate_id, event_type, payload, attempts, processed_at)
		SELECT 'order', (i % 1000)::text, 'order.created', '{"n": 1}', i % 8, CASE WHEN i % 10 > 0 THEN now() END
		FROM generate_series(1, 100000) i`)
	const filenode = "SELECT pg_relation_filenode('outbox_events')"
	oldFilenode := testenv.QueryInt(t, db, filenode)
	oldDead := testenv.QueryInt(t, db, "SELECT count(*) FROM outbox_dead_letters")
	if oldDead == 0 {
		t.Fatal("no dead letters to upgrade")
	}

	traffic := startWriters(t, db)
	out := migrated(t, dsn)
	written, slowest := traffic.stop()
	t.Logf("%d transactions written beside, the slowest took %v\n%s", written, slowest, out)
	// A writer waits behind our request for the table's lock, for lock_timeout at most, and then
	// for the transaction. It may do so in each of the tries, but hardly the same one twice.
	if slowest > 5*time.Second {
		t.Errorf("slowest writer took %v, want 5s at most", slowest)
	}

	if got := testenv.QueryInt(t, db, filenode); got != oldFilenode {
		t.Errorf("filenode = %d, was %d: the table was rewritten", got, oldFilenode)
	}
	if got := testenv.QueryInt(t, db, "SELECT count(*) FROM outbox_events WHERE seq = 0"); got < 100000 {
		t.Errorf("rows with seq 0 = %d, want all 100000 that were there before", got)
	}
	if got := testenv.QueryInt(t, db, "SELECT count(*) - count(DISTINCT seq) FROM outbox_events WHERE seq > 0"); got != 0 {
		t.Errorf("%d rows share a seq", got)
	}
	testenv.InsertEvent(t, db)
	if got := testenv.QueryInt(t, db, "SELECT seq FROM outbox_events ORDER BY created_at DESC, seq DESC LIMIT 1"); got < 1 {
		t.Errorf("seq of a new row = %d, want more than 0", got)
	}
	if got := testenv.QueryInt(t, db, "SELECT count(*) FROM outbox_dead_letters"); got != oldDead {
		t.Errorf("dead letters = %d, were %d", got, oldDead)
	}
	if want := fmt.Sprintf("marked %d events with 5 or more failed attempts as dead letters", oldDead); !strings.Contains(out, want) {
		t.Errorf("output lacks %q", want)
	}
	if got := testenv.QueryInt(t, db, "SELECT count(*) FROM pg_class WHERE relname = 'idx_outbox_unprocessed'"); got != 0 {
		t.Error("the older index is still there")
	}
	if got := testenv.QueryInt(t, db, "SELECT count(*) FROM pg_trigger WHERE tgrelid = 'outbox_events'::regclass AND NOT tgisinternal"); got != 1 {
		t.Errorf("triggers = %d, want only ours", got)
	}
	assertNothingToDo(t, dsn)
}

func TestMigrateMarksDeadLettersOnce(t *testing.T) {
	t.Parallel()
	dsn, db := testenv.OpenDatabase(t)
	testenv.MustExec(t, db, olderSchema(t))
	insert := func(n, attempts int) {
		testenv.MustExec(t, db, fmt.Sprintf(`INSERT INTO outbox_events (aggregate_type, aggregate_id, event_type, payload, attempts)
			SELECT 'order', i::text, 'order.created', '{}', %d FROM generate_series(1, %d) i`, attempts, n))
	}
	insert(25000, 0) // several portions without any
	insert(12000, 5) // and more than one portion of them
	insert(1, 4)

	if out := migrated(t, dsn); !strings.Contains(out, "marked 12000 events") {
		t.Errorf("output does not say that it marked 12000 events:\n%s", out)
	}
	if got := testenv.QueryInt(t, db, "SELECT count(*) FROM outbox_events WHERE dead_at IS NOT NULL AND last_error LIKE '%after 5 attempts'"); got != 12000 {
		t.Errorf("dead letters = %d, want 12000", got)
	}

	// To the new relay, 7 attempts of 10 are not the end.
	insert(1, 7)
	testenv.MustExec(t, db, "UPDATE outbox_events SET attempts = 7, retry_after = now() WHERE attempts = 4")
	assertNothingToDo(t, dsn)
	if got := testenv.QueryInt(t, db, "SELECT count(*) FROM outbox_events WHERE dead_at IS NOT NULL"); got != 12000 {
		t.Errorf("dead letters after another run = %d, want 12000", got)
	}
}

func TestMigrateGoesOnMarkingAfterItWasCutOff(t *testing.T) {
	t.Parallel()
	dsn, db := testenv.OpenDatabase(t)
	testenv.MustExec(t, db, olderSchema(t))
	testenv.MustExec(t, db, `INSERT INTO outbox_events (aggregate_type, aggregate_id, event_type, payload, attempts)
		SELECT 'order', i::text, 'order.created', '{}', 5 FROM generate_series(1, 3) i`)
	testenv.MustExec(t, db, "DROP VIEW outbox_dead_letters")

	// Cut off while the indexes wait for an older snapshot: the columns are there, nothing is marked.
	holder := testenv.Begin(t, db, "SET TRANSACTION ISOLATION LEVEL REPEATABLE READ")
	testenv.QueryInt(t, holder, "SELECT 1")
	ctx, cancel := context.WithCancel(t.Context())
	var out lineBuffer
	result := make(chan error, 1)
	go func() {
		result <- migrate(ctx, dsn, &out, limits{lockTries: 5, turn: time.Minute, watch: 20 * time.Millisecond})
	}()
	testenv.Until(t, func() bool { return strings.Contains(out.String(), "building index") })
	cancel()
	if err := <-result; err == nil {
		t.Fatal("no error though it was interrupted")
	}
	if got := testenv.QueryInt(t, db, "SELECT count(*) FROM outbox_events WHERE dead_at IS NOT NULL"); got != 0 {
		t.Fatalf("dead letters marked before the cut = %d, want 0", got)
	}
	if err := holder.Rollback(); err != nil {
		t.Fatal(err)
	}
	migrated(t, dsn)
	if got := testenv.QueryInt(t, db, "SELECT count(*) FROM outbox_dead_letters"); got != 3 {
		t.Errorf("dead letters = %d, want 3", got)
	}

	// As if it had been cut off before the last one.
	testenv.MustExec(t, db, sqlComment(t, "add dead_at"))
	testenv.MustExec(t, db, "UPDATE outbox_events SET dead_at = NULL WHERE aggregate_id = '3'")
	testenv.MustExec(t, db, "UPDATE outbox_events SET dead_at = NULL, retry_after = now() WHERE aggregate_id = '2'") // failed since
	if out := migrated(t, dsn); !strings.Contains(out, "marked 1 event ") {
		t.Errorf("output does not say that it marked 1 event:\n%s", out)
	}
	assertNothingToDo(t, dsn)
}

func TestMigrateRebuildsAnInvalidIndex(t *testing.T) {
	t.Parallel()
	dsn, db := testenv.OpenDatabase(t)
	testenv.MustExec(t, db, sqlfiles.Schema)
	testenv.MustExec(t, db, "DROP INDEX outbox_events_retry")
	holder := testenv.Begin(t, db, "INSERT INTO outbox_events (aggregate_type, aggregate_id, event_type, payload) VALUES ('a', '1', 'e', '{}')")
	conn, err := db.Conn(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	if _, err := conn.ExecContext(t.Context(), "SET lock_timeout = '50ms'"); err != nil {
		t.Fatal(err)
	}
	create := strings.Replace(sqlfiles.Indexes()[1].Create, "INDEX", "INDEX CONCURRENTLY", 1)
	if _, err := conn.ExecContext(t.Context(), create); err == nil {
		t.Fatal("the index was built beside an open transaction")
	}
	const invalid = "SELECT count(*) FROM pg_index WHERE indrelid = 'outbox_events'::regclass AND NOT indisvalid"
	if got := testenv.QueryInt(t, db, invalid); got != 1 {
		t.Fatalf("invalid indexes = %d, want 1", got)
	}
	// The transaction is still open, so the next build has to wait, and says for whom.
	var out lineBuffer
	result := make(chan error, 1)
	go func() {
		result <- migrate(t.Context(), dsn, &out, limits{lockTries: 5, turn: time.Minute, watch: 20 * time.Millisecond})
	}()
	testenv.Until(t, func() bool { return strings.Contains(out.String(), "waits for a transaction to end: pid ") })
	if err := holder.Rollback(); err != nil {
		t.Fatal(err)
	}
	if err := <-result; err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{"dropped index outbox_events_retry, whose build was cut off\n", "built index outbox_events_retry in "} {
		if !strings.Contains(out.String(), want) {
			t.Errorf("output lacks %q:\n%s", want, out.String())
		}
	}
	if got := testenv.QueryInt(t, db, invalid); got != 0 {
		t.Errorf("invalid indexes = %d, want 0", got)
	}
	assertNothingToDo(t, dsn)
}

func TestMigrateRefusesWhatIsNotOurs(t *testing.T) {
	fresh, older := sqlfiles.Schema, olderSchema(t)
	for name, tc := range map[string]struct{ setup, change, want string }{
		"column missing":        {older, "ALTER TABLE outbox_events DROP COLUMN event_type CASCADE", "no column event_type"},
		"column of other type":  {older, "DROP VIEW outbox_dead_letters; ALTER TABLE outbox_events ALTER COLUMN id DROP DEFAULT, ALTER COLUMN id TYPE TEXT", "column id is text, not uuid"},
		"time without zone":     {fresh, "ALTER TABLE outbox_events ADD COLUMN x INT; DROP VIEW outbox_dead_letters; ALTER TABLE outbox_events ALTER COLUMN retry_after TYPE TIMESTAMP", "column retry_after is timestamp without time zone, not timestamp with time zone"},
		"payload of other type": {older, "DROP VIEW outbox_dead_letters; ALTER TABLE outbox_events ALTER COLUMN payload TYPE XML USING payload::text::xml", "column payload is xml, not jsonb or json or text or bytea"},
		"column may be NULL":    {older, "ALTER TABLE outbox_events ALTER COLUMN attempts DROP NOT NULL", "column attempts may be NULL"},
		"seq is no identity":    {older, "ALTER TABLE outbox_events ADD COLUMN seq BIGINT NOT NULL DEFAULT 0", "seq is not an identity column"},
		"no primary key":        {older, "ALTER TABLE outbox_events DROP CONSTRAINT outbox_events_pkey", "no primary key"},
		"partitioned": {
			"CREATE TABLE outbox_events (id UUID, created_at TIMESTAMPTZ) PARTITION BY RANGE (created_at)", "",
			"partitioned, which is not supported",
		},
		"a view":                       {"CREATE VIEW outbox_events AS SELECT 1 AS id", "", "is no table"},
		"state table of somebody else": {"CREATE TABLE outbox_relay_state (id INT)", "", `table outbox_relay_state of schema "public" is there and is not an outbox of ours: it has no columns singleton, leader, `},
		"dead letters are a table":     {older, "DROP VIEW outbox_dead_letters; CREATE TABLE outbox_dead_letters (id INT)", "outbox_dead_letters is there and is no view"},
		"index name is taken":          {fresh, "DROP INDEX outbox_events_retry; CREATE TABLE x (id INT); CREATE INDEX outbox_events_retry ON x (id)", "index outbox_events_retry cannot be built"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			dsn, db := testenv.OpenDatabase(t)
			testenv.MustExec(t, db, tc.setup)
			testenv.MustExec(t, db, tc.change)
			assertRefused(t, dsn, ErrConflict, tc.want)
		})
	}
}

func TestMigrateAcceptsWhatWorks(t *testing.T) {
	older := olderSchema(t)
	for name, change := range map[string]string{
		"payload is json":      "DROP VIEW outbox_dead_letters; ALTER TABLE outbox_events ALTER COLUMN payload TYPE JSON",
		"payload is text":      "DROP VIEW outbox_dead_letters; ALTER TABLE outbox_events ALTER COLUMN payload TYPE TEXT",
		"payload is bytea":     "DROP VIEW outbox_dead_letters; ALTER TABLE outbox_events ALTER COLUMN payload TYPE BYTEA USING ''",
		"longer strings":       "DROP VIEW outbox_dead_letters; ALTER TABLE outbox_events ALTER COLUMN aggregate_id TYPE VARCHAR(200), ALTER COLUMN event_type TYPE TEXT",
		"more columns":         "ALTER TABLE outbox_events ADD COLUMN tenant INT",
		"no default":           "ALTER TABLE outbox_events ALTER COLUMN created_at DROP DEFAULT",
		"view has an order":    "DROP VIEW outbox_dead_letters; CREATE VIEW outbox_dead_letters AS SELECT payload, id FROM outbox_events WHERE attempts >= 5",
		"trigger of our name":  "ALTER TRIGGER outbox_events_notify ON outbox_events RENAME TO outbox_notify",
		"function of our name": "ALTER FUNCTION notify_outbox() RENAME TO outbox_notify",
		"another trigger":      "CREATE FUNCTION audit() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN RETURN NULL; END'; CREATE TRIGGER audit AFTER INSERT ON outbox_events FOR EACH ROW EXECUTE FUNCTION audit()",
		"options of its own":   "ALTER TABLE outbox_events SET (autovacuum_vacuum_threshold = 7)",
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			dsn, db := testenv.OpenDatabase(t)
			testenv.MustExec(t, db, older)
			testenv.MustExec(t, db, change)
			migrated(t, dsn)
			testenv.InsertEvent(t, db)
			testenv.QueryInt(t, db, "SELECT count(dead_at) FROM outbox_dead_letters")
			want := 1
			if name == "another trigger" {
				want = 2
			}
			if got := testenv.QueryInt(t, db, "SELECT count(*) FROM pg_trigger WHERE tgrelid = 'outbox_events'::regclass AND NOT tgisinternal"); got != want {
				t.Errorf("triggers = %d, want %d", got, want)
			}
			assertNothingToDo(t, dsn)
		})
	}
}

func TestMigrateWithoutRights(t *testing.T) {
	dsn, db := testenv.OpenDatabase(t)
	role, other := testenv.Role(t, db), testenv.Role(t, db)
	testenv.MustExec(t, db, "REVOKE CREATE ON SCHEMA public FROM PUBLIC")
	assertRefused(t, testenv.AsRole(t, dsn, role), ErrRights, fmt.Sprintf("user %q may not create anything in schema \"public\"", role))

	testenv.MustExec(t, db, fmt.Sprintf("GRANT CREATE ON SCHEMA public TO %s, %s", role, other))
	migrated(t, testenv.AsRole(t, dsn, role))
	testenv.MustExec(t, db, "DROP INDEX outbox_events_retry")
	testenv.MustExec(t, db, "GRANT SELECT ON outbox_relay_state TO "+other)
	assertRefused(t, testenv.AsRole(t, dsn, other), ErrRights, fmt.Sprintf("user %q may not alter outbox_events, its owner is %q", other, role))

	// Where nothing is to be done, no right is missed.
	migrated(t, testenv.AsRole(t, dsn, role))
	assertNothingToDo(t, testenv.AsRole(t, dsn, other))
}

func TestMigrateWithOneSessionOnly(t *testing.T) {
	dsn, db := testenv.OpenDatabase(t)
	role := testenv.Role(t, db)
	testenv.MustExec(t, db, fmt.Sprintf("GRANT CREATE ON SCHEMA public TO %s; ALTER ROLE %[1]s CONNECTION LIMIT 1", role))
	migrated(t, testenv.AsRole(t, dsn, role))
	if got := testenv.QueryInt(t, db, "SELECT count(*) FROM outbox_relay_state"); got != 1 {
		t.Errorf("rows in outbox_relay_state = %d, want 1", got)
	}
}

func TestMigrateDoesNotGetTheLock(t *testing.T) {
	t.Parallel()
	dsn, db := testenv.OpenDatabase(t)
	testenv.MustExec(t, db, olderSchema(t))
	reader := testenv.Begin(t, db, "SET application_name = 'a long report'; LOCK TABLE outbox_events IN ACCESS SHARE MODE")
	pid := testenv.QueryInt(t, reader, "SELECT pg_backend_pid()")

	traffic := startWriters(t, db)
	start := time.Now()
	assertRefused(t, dsn, ErrLocked, fmt.Sprintf(`lock on outbox_events not had in 2 tries, others keep it: pid %d, user `, pid),
		`application_name "a long report"`, "query started 20")
	written, slowest := traffic.stop()
	t.Logf("gave up after %v; %d transactions beside, the slowest %v", time.Since(start), written, slowest)
	if slowest > 5*time.Second {
		t.Errorf("slowest writer took %v, want 5s at most", slowest)
	}
	if got := testenv.QueryInt(t, db, "SELECT count(*) FROM pg_attribute WHERE attrelid = 'outbox_events'::regclass AND attname = 'seq'"); got != 0 {
		t.Error("seq was added though the lock was not had")
	}

	// The reader ends while migrate still tries.
	var out lineBuffer
	result := make(chan error, 1)
	go func() { result <- Run(t.Context(), dsn, &out) }()
	testenv.Until(t, func() bool {
		return strings.Contains(out.String(), "lock on outbox_events not had, trying again: pid ")
	})
	if err := reader.Rollback(); err != nil {
		t.Fatal(err)
	}
	if err := <-result; err != nil {
		t.Fatalf("%v\n%s", err, out.String())
	}
	assertNothingToDo(t, dsn)
}

func TestMigrateWaitsForItsTurn(t *testing.T) {
	t.Parallel()
	dsn, db := testenv.OpenDatabase(t)
	oid := testenv.QueryInt(t, db, "SELECT 'public'::regnamespace::oid::bigint")
	holder := testenv.Begin(t, db, fmt.Sprintf("SELECT pg_advisory_xact_lock(%d, %d)", sqlfiles.MigrateLockClass, sqlfiles.LockKey(uint32(oid))))
	assertRefused(t, dsn, ErrLocked, "another migrate has been at work", "pid ")
	if err := holder.Rollback(); err != nil {
		t.Fatal(err)
	}
	migrated(t, dsn)
}

func TestMigrateOnAReadOnlyServer(t *testing.T) {
	dsn, _ := testenv.OpenDatabase(t)
	assertRefused(t, testenv.WithParameter(t, dsn, "default_transaction_read_only", "on"), ErrReadOnly, "is read-only here")
}

func TestMigrateChoosesTheSchemaBySearchPath(t *testing.T) {
	dsn, db := testenv.OpenDatabase(t)
	testenv.MustExec(t, db, "CREATE SCHEMA shop; CREATE SCHEMA bank")
	shop, bank := testenv.WithParameter(t, dsn, "search_path", "shop"), testenv.WithParameter(t, dsn, "search_path", "bank,shop")

	if out := migrated(t, shop); !strings.Contains(out, `schema "shop"`) {
		t.Errorf("output does not name the schema:\n%s", out)
	}
	// Unqualified names mean shop's table: to make another in bank would split the outbox in two.
	assertRefused(t, bank, ErrConflict, `outbox_events is in schema "shop", but new tables would go to "bank"`)
	migrated(t, testenv.WithParameter(t, dsn, "search_path", "bank"))
	assertNothingToDo(t, bank)
	assertNothingToDo(t, shop)
	if got := testenv.QueryInt(t, db, "SELECT count(*) FROM pg_class WHERE relname LIKE 'outbox%' AND relnamespace = 'public'::regnamespace"); got != 0 {
		t.Errorf("%d relations ended up in public", got)
	}
	if got := testenv.QueryInt(t, db, "SELECT count(DISTINCT t.tgfoid) FROM pg_trigger t WHERE t.tgname = 'outbox_notify'"); got != 2 {
		t.Errorf("trigger functions = %d, want one a schema", got)
	}
	assertRefused(t, testenv.WithParameter(t, dsn, "search_path", "nowhere"), ErrConflict, "names no schema that exists")
}

func TestMigrateTellsAPooler(t *testing.T) {
	dsn, _ := testenv.OpenDatabase(t)
	cfg, err := pq.NewConfig(dsn)
	if err != nil {
		t.Fatal(err)
	}
	a, err := openSession(t.Context(), cfg)
	if err != nil {
		t.Fatal(err)
	}
	defer a.close()
	b, err := openSession(t.Context(), cfg)
	if err != nil {
		t.Fatal(err)
	}
	defer b.close()
	if err := checkDirect(t.Context(), a, b); err != nil {
		t.Errorf("two sessions of the server itself: %v", err)
	}
	if err := checkDirect(t.Context(), a, a); !errors.Is(err, ErrPooler) { // one process serves both
		t.Errorf("err = %v, want ErrPooler", err)
	}
}

func TestMigrateSessionWaits(t *testing.T) {
	dsn, _ := testenv.OpenDatabase(t)
	cfg, err := pq.NewConfig(dsn)
	if err != nil {
		t.Fatal(err)
	}
	s, err := openSession(t.Context(), cfg)
	if err != nil {
		t.Fatal(err)
	}
	defer s.close()
	s.answerWithin(20 * time.Millisecond)
	s.answerWithin(forever) // leaves nothing of the limit before
	if _, err := s.ExecContext(t.Context(), "SELECT pg_sleep(0.2)"); err != nil {
		t.Errorf("without a limit: %v", err)
	}
	s.answerWithin(20 * time.Millisecond)
	if _, err := s.ExecContext(t.Context(), "SELECT pg_sleep(5)"); !errors.Is(err, os.ErrDeadlineExceeded) {
		t.Errorf("err = %v, want a deadline exceeded", err)
	}
}

func TestMigrateNeverShowsThePassword(t *testing.T) {
	for _, dsn := range []string{
		"postgres://u:s3cret@127.0.0.1:1/db?sslmode=disable",
		"postgres://u:s3cret@127.0.0.1:port/db",
		"postgres://u:s3c%ret@127.0.0.1/db",
		"host=127.0.0.1 port=1 password=s3cret sslmode=disable",
		"host=127.0.0.1 password='s3cret",
		"host=127.0.0.1 password=x s3cret",
	} {
		var out lineBuffer
		err := Run(t.Context(), dsn, &out)
		if err == nil {
			t.Fatalf("%s: no error", dsn)
		}
		if text := err.Error() + out.String(); strings.Contains(text, "s3c") || strings.Contains(text, "\n") {
			t.Errorf("%s: %q", dsn, text)
		}
	}
}

func TestMigrateServerFaults(t *testing.T) {
	good := serverFacts{versionNum: 140000, version: "14.0", database: "shop", schema: "public", user: "me", path: "public"}
	if err := good.fault(); err != nil {
		t.Fatal(err)
	}
	for name, tc := range map[string]struct {
		mutate func(*serverFacts)
		want   error
	}{
		"too old":   {func(s *serverFacts) { s.versionNum, s.version = 130018, "13.18" }, ErrServer},
		"read-only": {func(s *serverFacts) { s.readOnly = true }, ErrReadOnly},
		"no schema": {func(s *serverFacts) { s.schema = "" }, ErrConflict},
	} {
		s := good
		tc.mutate(&s)
		if err := s.fault(); !errors.Is(err, tc.want) {
			t.Errorf("%s: err = %v, want %v", name, err, tc.want)
		}
	}
}

func olderSchema(t *testing.T) string {
	t.Helper()
	text, err := os.ReadFile("testdata/older_schema.sql")
	if err != nil {
		t.Fatal(err)
	}
	return string(text)
}

// sqlComment returns the COMMENT statement of a section.
func sqlComment(t *testing.T, section string) string {
	t.Helper()
	comment := regexp.MustCompile(`(?m)^COMMENT ON .*$`).FindString(sqlfiles.MigrateSection(section))
	if comment == "" {
		t.Fatalf("no comment in section %s", section)
	}
	return comment
}

// migrated runs migrate, which must work, and returns its output.
func migrated(t *testing.T, dsn string) string {
	t.Helper()
	var out lineBuffer
	if err := Run(t.Context(), dsn, &out); err != nil {
		t.Fatalf("migrate: %v\n%s", err, out.String())
	}
	return out.String()
}

func assertNothingToDo(t *testing.T, dsn string) {
	t.Helper()
	if out := migrated(t, dsn); !strings.HasSuffix(out, "\nnothing to do: schema is up to date\n") || strings.Count(out, "\n") != 2 {
		t.Errorf("run again, migrate found something to do:\n%s", out)
	}
}

// assertRefused runs migrate, which must end in one line with all of want, of the given kind.
func assertRefused(t *testing.T, dsn string, kind error, want ...string) {
	t.Helper()
	var out lineBuffer
	err := migrate(t.Context(), dsn, &out, impatient)
	if !errors.Is(err, kind) {
		t.Errorf("err = %v, want one of kind %q\n%s", err, kind, out.String())
		return
	}
	if strings.Contains(err.Error(), "\n") {
		t.Errorf("more than one line: %q", err)
	}
	for _, w := range want {
		if !strings.Contains(err.Error(), w) {
			t.Errorf("err = %q, want it to say %q", err, w)
		}
	}
	t.Log(err)
}

// traffic is a few applications that insert events.
type traffic struct {
	t       *testing.T
	cancel  context.CancelFunc
	wg      sync.WaitGroup
	written atomic.Int64
	slowest atomic.Int64 // ns
}

// startWriters starts applications that insert an event every few milliseconds, or in
// transactions that stay open for a while. An INSERT that fails, fails the test.
func startWriters(t *testing.T, db *sql.DB) *traffic {
	ctx, cancel := context.WithCancel(t.Context())
	w := &traffic{t: t, cancel: cancel}
	for i := range 4 {
		w.wg.Go(func() {
			for ctx.Err() == nil {
				w.write(db, time.Duration(i)*100*time.Millisecond)
				_ = pause(ctx, 5*time.Millisecond)
			}
		})
	}
	t.Cleanup(func() { w.stop() })
	return w
}

func (w *traffic) write(db *sql.DB, open time.Duration) {
	start := time.Now()
	tx, err := db.Begin()
	if err == nil {
		_, err = tx.Exec("INSERT INTO outbox_events (aggregate_type, aggregate_id, event_type, payload) VALUES ('order', $1, 'order.created', '{}')", w.written.Load())
		took := int64(time.Since(start))
		for {
			old := w.slowest.Load()
			if took <= old || w.slowest.CompareAndSwap(old, took) {
				break
			}
		}
		time.Sleep(open) // the transaction does other things
		err = errors.Join(err, tx.Commit())
	}
	if err != nil {
		w.t.Errorf("a writer failed: %v", err)
	}
	w.written.Add(1)
}

// stop returns how many transactions there were, and how long the slowest INSERT took.
func (w *traffic) stop() (int64, time.Duration) {
	w.cancel()
	w.wg.Wait()
	return w.written.Load(), time.Duration(w.slowest.Load())
}

// lineBuffer is an output that can be read while it is written to.
type lineBuffer struct {
	mu   sync.Mutex
	text strings.Builder
}

func (b *lineBuffer) Write(p []byte) (int, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.text.Write(p)
}

func (b *lineBuffer) String() string {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.text.String()
}
