-- What `outbox-relay status`, `pause` and `resume` ask and do, each in a section of its own. They lock
-- nothing, and what they read is bounded: counts stop at a limit, and nothing looks at processed rows.

-- section: planner
-- Statistics of a queue are always wrong: the statements are written for the partial indexes.
SET LOCAL enable_seqscan = off;
SET LOCAL jit = off;
SET LOCAL max_parallel_workers_per_gather = 0;

-- section: server
SELECT clock_timestamp(), current_database(), current_setting('server_version');

-- section: state
SELECT coalesce(leader, ''), leader_since, clean, deaths, paused_at, coalesce(paused_by, ''),
       coalesce(last_error, ''), last_error_at
FROM outbox_relay_state;

-- section: relays
-- Sessions that hold a lock on the outbox with oid $1, with their flags; silent writers are not among
-- them. Every role sees locks, user and application_name; address and start of other roles' sessions
-- only those with pg_read_all_stats.
WITH holders AS (
    SELECT l.pid,
           bool_or(l.classid = {{.Work}}) AS works,
           bool_or(l.classid = {{.Work}} AND l.mode = 'ExclusiveLock') AS alone,
           bool_or(l.classid = {{.Doorbell}} AND l.mode = 'ExclusiveLock') AS bell,
           bool_or(l.classid = {{.Relay}}) AS relay,
           bool_or(l.classid = {{.Broker}}) AS broker,
           bool_or(l.classid = {{.Listen}}) AS listens,
           bool_or(l.classid = {{.Paused}}) AS paused
    FROM pg_locks l
    WHERE l.locktype = 'advisory' AND l.granted AND l.objsubid = 2 AND l.pid IS NOT NULL
      AND l.database = (SELECT oid FROM pg_database WHERE datname = current_database())
      AND l.objid = $1::bigint::oid
    GROUP BY l.pid
)
SELECT h.pid, h.works, h.alone, h.bell, h.relay, h.broker, h.listens, h.paused,
       coalesce(a.usename, ''), coalesce(a.application_name, ''), coalesce(host(a.client_addr), ''), a.backend_start
FROM holders h LEFT JOIN pg_stat_activity a USING (pid)
WHERE h.works OR h.relay OR h.bell
ORDER BY h.works DESC, a.backend_start, h.pid;

-- section: silent writers
-- Open transactions that inserted events without ringing into the outbox with oid $1, which keep the
-- relay awake: how many, and the oldest. pid 0 is a prepared transaction.
SELECT count(*) OVER (), coalesce(l.pid, 0), coalesce(a.usename, ''), coalesce(a.application_name, ''), a.xact_start
FROM pg_locks l LEFT JOIN pg_stat_activity a ON a.pid = l.pid
WHERE l.locktype = 'advisory' AND l.granted AND l.objsubid = 2 AND l.mode = 'ShareLock'
  AND l.database = (SELECT oid FROM pg_database WHERE datname = current_database())
  AND l.classid = {{.Doorbell}} AND l.objid = $1::bigint::oid
ORDER BY a.xact_start NULLS FIRST LIMIT 1;

-- section: backlog
-- $1: where counts stop. Index outbox_events_fresh, the others by outbox_events_blocking.
WITH failed AS MATERIALIZED (
    SELECT dead_at, created_at, retry_after FROM outbox_events
    WHERE processed_at IS NULL AND (retry_after IS NOT NULL OR dead_at IS NOT NULL)
    LIMIT $1
)
SELECT (SELECT count(*) FROM (
           SELECT FROM outbox_events
           WHERE processed_at IS NULL AND dead_at IS NULL AND retry_after IS NULL LIMIT $1) fresh),
       (SELECT count(*) FROM failed WHERE dead_at IS NULL),
       (SELECT count(*) FROM failed WHERE dead_at IS NOT NULL),
       least((SELECT created_at FROM outbox_events
              WHERE processed_at IS NULL AND dead_at IS NULL AND retry_after IS NULL
              ORDER BY seq, created_at, id LIMIT 1),
             (SELECT min(created_at) FROM failed WHERE dead_at IS NULL)),
       (SELECT min(retry_after) FROM outbox_events
        WHERE processed_at IS NULL AND dead_at IS NULL AND retry_after IS NOT NULL);

-- section: held
-- Aggregates with a failed event and how many wait behind it, those with the most first. $1: how many
-- events are looked at, of failed and of waiting ones each. $2: dead letters hold as well. $3: how
-- many aggregates.
WITH failed AS MATERIALIZED (
    SELECT DISTINCT ON (f.aggregate_type, f.aggregate_id) f.*
    FROM (SELECT aggregate_type, aggregate_id, seq, created_at, id, event_type, attempts, retry_after, dead_at, last_error
          FROM outbox_events
          WHERE processed_at IS NULL AND (retry_after IS NOT NULL OR dead_at IS NOT NULL)
          LIMIT $1) f
    WHERE f.dead_at IS NULL OR $2
    ORDER BY f.aggregate_type, f.aggregate_id, f.seq, f.created_at, f.id
), fresh AS MATERIALIZED (
    SELECT aggregate_type, aggregate_id, seq, created_at, id FROM outbox_events
    WHERE processed_at IS NULL AND dead_at IS NULL AND retry_after IS NULL
    ORDER BY seq, created_at, id LIMIT $1
), waiting AS (
    SELECT f.id, count(*) AS n
    FROM failed f JOIN fresh USING (aggregate_type, aggregate_id)
    WHERE (fresh.seq, fresh.created_at, fresh.id) > (f.seq, f.created_at, f.id)
    GROUP BY f.id
)
SELECT count(*) OVER (), f.aggregate_type, f.aggregate_id, f.id::text, f.event_type, f.attempts,
       f.dead_at IS NOT NULL, coalesce(f.dead_at, f.created_at), f.retry_after, coalesce(f.last_error, ''),
       coalesce(w.n, 0), (SELECT count(*) FROM fresh) = $1
FROM failed f LEFT JOIN waiting w USING (id)
ORDER BY coalesce(w.n, 0) DESC, f.created_at, f.id LIMIT $3;

-- section: counters
-- Rows inserted, changed and deleted in the table with oid $1 since statistics were last reset.
-- Sessions report them about once a second.
SELECT coalesce(pg_stat_get_tuples_inserted($1::bigint::oid), 0), coalesce(pg_stat_get_tuples_updated($1::bigint::oid), 0),
       coalesce(pg_stat_get_tuples_deleted($1::bigint::oid), 0);

-- section: pause
-- $1: by whom and why; if it is paused already, that is replaced only when $2. Returns since when and by whom it was
-- paused before.
WITH before AS MATERIALIZED (SELECT paused_at, paused_by FROM outbox_relay_state FOR UPDATE)
UPDATE outbox_relay_state s
SET paused_at = coalesce(before.paused_at, clock_timestamp()),
    paused_by = CASE WHEN before.paused_at IS NULL OR $2 THEN $1 ELSE before.paused_by END
FROM before RETURNING before.paused_at, coalesce(before.paused_by, '');

-- section: resume
-- Returns since when and by whom it was paused. The notification tells the relay at once.
WITH before AS MATERIALIZED (SELECT paused_at, paused_by FROM outbox_relay_state FOR UPDATE)
UPDATE outbox_relay_state s SET paused_at = NULL, paused_by = NULL
FROM before WHERE s.paused_at IS NOT NULL
RETURNING before.paused_at, coalesce(before.paused_by, ''), pg_notify('outbox_event', '');
