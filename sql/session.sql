-- The short statements of the relay's working session, each in a section of its own.

-- section: setup
-- A holder of our locks that froze or whose host vanished must lose them within 15 seconds: an
-- idle session by the first two, one that was sending or receiving by the kernel's limits.
-- The planner's freedom is taken away because statistics of a queue are always wrong: the
-- statements are written for their indexes.
-- No commit waits for the disk. What the relay writes is safe from its own death at once, and from a crash of
-- PostgreSQL within three wal_writer_delay (0.6 s); what such a crash takes back is done again, and the
-- events that were marked in its last moments are sent again. In return the relay is free for the next
-- event at once, and the disk for the writers.
SET synchronous_commit = off;
SET idle_session_timeout = '12s';
SET idle_in_transaction_session_timeout = '12s';
SET tcp_keepalives_idle = 5;
SET tcp_keepalives_interval = 2;
SET tcp_keepalives_count = 3;
SET tcp_user_timeout = '12s';
SET statement_timeout = '10s';
SET lock_timeout = '100ms';
SET default_transaction_isolation = 'read committed';
SET plan_cache_mode = force_generic_plan;
SET enable_seqscan = off;
SET enable_bitmapscan = off;
SET enable_hashjoin = off;
SET enable_mergejoin = off;
SET enable_sort = off; -- where an index has the order; elsewhere rows are sorted all the same
SET max_parallel_workers_per_gather = 0;
SET jit = off;
SET work_mem = '32MB';

-- section: facts
SELECT c.oid::bigint, a.atttypid::regtype::text, pg_backend_pid(), pg_is_in_recovery(),
       current_setting('server_version_num')::int,
       (extract(epoch FROM clock_timestamp()) * 1000000)::bigint
FROM pg_class c
LEFT JOIN pg_attribute a ON a.attrelid = c.oid AND a.attname = 'payload' AND NOT a.attisdropped
WHERE c.oid = to_regclass('outbox_events');

-- section: backend
SELECT pg_backend_pid();

-- section: work lock exclusive
SELECT pg_try_advisory_lock({{.Class}}, {{.Key}});

-- section: work lock shared
SELECT pg_try_advisory_lock_shared({{.Class}}, {{.Key}});

-- section: work lock holder
-- Who keeps us from working. application_name is hidden from roles that may not see it.
SELECT l.pid, coalesce(a.usename, '?'), coalesce(a.application_name, '?'),
       coalesce(a.application_name, '') IN ('', current_setting('application_name')), l.mode = 'ExclusiveLock'
FROM pg_locks l
LEFT JOIN pg_stat_activity a ON a.pid = l.pid
WHERE l.locktype = 'advisory' AND l.granted AND l.objsubid = 2
  AND l.database = (SELECT oid FROM pg_database WHERE datname = current_database())
  AND l.classid::bigint = {{.Class}}::bigint AND l.objid = {{.Key}}::int::oid
LIMIT 1;

-- section: keeper try
SELECT pg_try_advisory_lock({{.Class}}, {{.Key}});

-- section: doorbell try
SELECT pg_try_advisory_lock({{.Class}}, {{.Key}});

-- section: doorbell release
SELECT pg_advisory_unlock({{.Class}}, {{.Key}});

-- section: flag up
SELECT pg_try_advisory_lock_shared({{.Class}}, {{.Key}});

-- section: flag down
SELECT pg_advisory_unlock_shared({{.Class}}, {{.Key}});

-- section: note error
UPDATE outbox_relay_state SET last_error = $1, last_error_at = clock_timestamp();

-- section: beat
-- A server that was demoted may go on answering; its writers are elsewhere.
SELECT current_setting('transaction_read_only')::bool,
       coalesce((SELECT paused_at IS NOT NULL FROM outbox_relay_state), false),
       coalesce(to_regclass('outbox_events')::oid::bigint, 0);

-- section: begin work
-- Returns how many relays in a row ended without an end in order, this one's own sessions apart. $2:
-- this relay led before and lost its session, so whoever led next counted its death in error.
WITH before AS MATERIALIZED (SELECT leader, clean, deaths FROM outbox_relay_state FOR UPDATE)
UPDATE outbox_relay_state s
SET leader = $1, leader_since = now(), clean = false,
    deaths = CASE WHEN before.clean THEN 0 WHEN before.leader = $1 THEN before.deaths
                  ELSE before.deaths + CASE WHEN $2 THEN 0 ELSE 1 END END
FROM before
RETURNING s.deaths;

-- section: end work
UPDATE outbox_relay_state SET clean = true, deaths = 0;

-- section: suspect
-- Notes that an event is about to be taken in hand. Returns how often that was noted. $2: how much
-- to add, 0 if this relay has noted it before.
INSERT INTO outbox_suspects AS s (id, deaths, claimed_at) VALUES ($1, 1, now())
ON CONFLICT (id) DO UPDATE SET deaths = s.deaths + $2, claimed_at = now()
RETURNING deaths;

-- section: acquit
DELETE FROM outbox_suspects WHERE id = $1;

-- section: acquit all
WITH none AS (DELETE FROM outbox_suspects)
UPDATE outbox_relay_state SET deaths = 0;

-- section: probe
SELECT pg_notify($1, '');

-- section: call others
SELECT pg_notify($1, $2);

-- section: unsettled
-- Which of these are still pending, with the attempts they have.
SELECT id::text, attempts FROM outbox_events
WHERE id = ANY ($1::uuid[]) AND processed_at IS NULL AND dead_at IS NULL;
