-- What `outbox-relay migrate` asks and does besides applying schema.sql. Not for psql: each
-- "-- section:" is run by name, some with arguments. Questions read catalogs only and lock
-- nothing; what locks outbox_events says which lock it takes.

-- section: bounded
-- Settings of the session: nothing of ours may run or wait for long. A lock that is waited for
-- holds up everybody who comes after.
SET statement_timeout = '30s';
SET lock_timeout = '2s';
SET idle_in_transaction_session_timeout = '30s';
SET client_min_messages = warning

-- section: unbounded
-- For the statements that build and drop indexes CONCURRENTLY: they take as long as they take,
-- wait for older transactions, and hold up no writer meanwhile.
SET statement_timeout = 0;
SET lock_timeout = 0

-- section: server
SELECT current_setting('server_version_num')::int,
       current_setting('server_version'),
       pg_is_in_recovery() OR current_setting('transaction_read_only')::bool,
       current_database(),
       coalesce(current_schema(), ''),
       current_user,
       current_setting('search_path'),
       coalesce(current_schema()::regnamespace::oid, 0),
       coalesce(has_schema_privilege(current_schema(), 'CREATE'), false)

-- section: table
-- $1: name. The relation of this name that unqualified statements mean.
SELECT c.oid, c.relkind::text, c.relispartition, c.relpersistence::text, c.relrowsecurity,
       n.nspname, pg_get_userbyid(c.relowner), pg_has_role(c.relowner, 'USAGE'),
       coalesce(array_to_string(c.reloptions, ','), ''), c.relname
FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace
WHERE c.oid = to_regclass(quote_ident($1))

-- section: columns
-- $1: oid of a table or view.
SELECT a.attname, format_type(a.atttypid, a.atttypmod), a.attnotnull, a.attidentity::text,
       a.atthasdef, coalesce(col_description(a.attrelid, a.attnum), '')
FROM pg_attribute a
WHERE a.attrelid = $1 AND a.attnum > 0 AND NOT a.attisdropped
ORDER BY a.attnum

-- section: unique id
-- $1: oid of a table. Is there a valid unique index on id alone?
SELECT EXISTS (
    SELECT FROM pg_index i
    JOIN pg_attribute a ON a.attrelid = i.indrelid AND a.attnum = i.indkey[0]
    WHERE i.indrelid = $1 AND i.indisunique AND i.indisvalid AND i.indnkeyatts = 1
      AND i.indpred IS NULL AND a.attname = 'id')

-- section: indexes of
-- $1: oid of a table.
SELECT c.relname, i.indisvalid, pg_get_indexdef(i.indexrelid)
FROM pg_index i JOIN pg_class c ON c.oid = i.indexrelid
WHERE i.indrelid = $1

-- section: triggers of
-- $1: oid of a table. The last column tells the row-level triggers of the older form, which
-- notify once a row.
SELECT t.tgname, t.tgtype = 4 AND p.proname = 'outbox_notify', t.tgenabled = 'D',
       p.oid::regprocedure::text,
       t.tgtype & 7 = 5 AND p.prosrc ILIKE '%outbox_event%'
           AND (p.prosrc ILIKE '%pg_notify%' OR p.prosrc ~* '\mnotify\M')
FROM pg_trigger t JOIN pg_proc p ON p.oid = t.tgfoid
WHERE t.tgrelid = $1 AND NOT t.tgisinternal

-- section: function source
SELECT coalesce((SELECT p.prosrc FROM pg_proc p
                 WHERE p.proname = 'outbox_notify' AND p.pronargs = 0
                   AND p.pronamespace = current_schema()::regnamespace), '')

-- section: state row
SELECT EXISTS (SELECT FROM outbox_relay_state)

-- section: view definition
-- $1: oid of a view.
SELECT pg_get_viewdef($1::oid, false)

-- section: lock table
-- Everything up to the commit happens behind this one lock, so that no statement has to wait
-- again while it holds another.
LOCK TABLE outbox_events IN ACCESS EXCLUSIVE MODE

-- section: add seq
-- ADD COLUMN ... IDENTITY would number the old rows, and so rewrite the table. A constant default
-- is stored in the catalog only; without it later, the sequence numbers what comes from now on.
ALTER TABLE outbox_events ADD COLUMN seq BIGINT NOT NULL DEFAULT 0;
ALTER TABLE outbox_events ALTER COLUMN seq DROP DEFAULT;
ALTER TABLE outbox_events ALTER COLUMN seq ADD GENERATED ALWAYS AS IDENTITY

-- section: add headers
ALTER TABLE outbox_events ADD COLUMN headers JSONB

-- section: add retry_after
ALTER TABLE outbox_events ADD COLUMN retry_after TIMESTAMPTZ

-- section: add last_error
ALTER TABLE outbox_events ADD COLUMN last_error TEXT

-- section: add dead_at
-- The comment remembers that the older form's dead letters have yet to be marked, over as many
-- runs as it takes.
ALTER TABLE outbox_events ADD COLUMN dead_at TIMESTAMPTZ;
COMMENT ON COLUMN outbox_events.dead_at IS 'outbox-relay migrate: rows with attempts >= 5 not all marked yet'

-- section: default id
ALTER TABLE outbox_events ALTER COLUMN id SET DEFAULT gen_random_uuid()

-- section: default attempts
ALTER TABLE outbox_events ALTER COLUMN attempts SET DEFAULT 0

-- section: default created_at
ALTER TABLE outbox_events ALTER COLUMN created_at SET DEFAULT now()

-- section: dead portion
-- Looks through the older form's pending rows, 10,000 at a time: which are dead letters? $1, $2:
-- created_at and id of the last row looked at. Index outbox_events_fresh; locks nothing. Rows that
-- failed since the upgrade have a retry_after and are left alone: to the relay an event is dead
-- when it has reached its own MAX_ATTEMPTS.
SELECT created_at::text, id::text, attempts >= 5 FROM outbox_events
WHERE processed_at IS NULL AND dead_at IS NULL AND retry_after IS NULL
  AND seq = 0 AND (created_at, id) > ($1::timestamptz, $2::uuid)
ORDER BY created_at, id LIMIT 10000

-- section: mark dead
-- $1: ids. Primary key; locks the rows. The list comes as an argument and not by a join, because
-- the planner knows nothing yet about the new columns, and would join each row with each.
UPDATE outbox_events
SET dead_at = now(), last_error = coalesce(last_error, 'gave up before the upgrade, after ' || attempts || ' attempts')
WHERE id = ANY($1::uuid[]) AND attempts >= 5
  AND processed_at IS NULL AND dead_at IS NULL AND retry_after IS NULL

-- section: marked
COMMENT ON COLUMN outbox_events.dead_at IS NULL

-- section: lock holders
-- $1: oid of outbox_events. Who holds a lock on it, longest transaction first.
SELECT coalesce(l.pid, 0),
       coalesce(a.usename, a.backend_type, ''),
       coalesce(a.application_name, ''),
       coalesce(to_char(a.query_start, 'YYYY-MM-DD HH24:MI:SS TZ'), '')
FROM pg_locks l LEFT JOIN pg_stat_activity a ON a.pid = l.pid
WHERE l.locktype = 'relation' AND l.relation = $1 AND l.granted
  AND l.database = (SELECT oid FROM pg_database WHERE datname = current_database())
  AND l.pid IS DISTINCT FROM pg_backend_pid()
ORDER BY a.xact_start NULLS FIRST LIMIT 1

-- section: migrate lock holder
-- $1: class, $2: key, as in the two-key form of the advisory locks.
SELECT coalesce(l.pid, 0),
       coalesce(a.usename, a.backend_type, ''),
       coalesce(a.application_name, ''),
       coalesce(to_char(a.query_start, 'YYYY-MM-DD HH24:MI:SS TZ'), '')
FROM pg_locks l LEFT JOIN pg_stat_activity a ON a.pid = l.pid
WHERE l.locktype = 'advisory' AND l.granted AND l.objsubid = 2
  AND l.classid = $1::int::oid AND l.objid = $2::int::oid
  AND l.database = (SELECT oid FROM pg_database WHERE datname = current_database())
LIMIT 1

-- section: index progress
-- $1: pid of the session that builds or drops an index. What it is doing, how far it is, and
-- whom it waits for.
SELECT coalesce(p.phase, ''),
       coalesce(100 * p.blocks_done / nullif(p.blocks_total, 0), 0)::int,
       coalesce(b.pid, 0),
       coalesce(b.usename, b.backend_type, ''),
       coalesce(b.application_name, ''),
       coalesce(to_char(b.query_start, 'YYYY-MM-DD HH24:MI:SS TZ'), '')
FROM (SELECT) one
LEFT JOIN pg_stat_progress_create_index p ON p.pid = $1
LEFT JOIN pg_stat_activity b ON b.pid = (pg_blocking_pids($1))[1]
