-- What `outbox-relay doctor` asks beside what status does, each in a section of its own: questions to
-- catalogs and statistics, which lock nothing and change nothing.

-- section: server
-- The server, and how many connections it and our role have left. Sessions of others are counted by every role.
SELECT current_setting('server_version'), (extract(epoch FROM clock_timestamp()) * 1000000)::bigint,
       current_setting('track_counts')::bool, current_setting('autovacuum')::bool,
       current_setting('max_connections')::int - (SELECT count(*) FROM pg_stat_activity WHERE backend_type = 'client backend'),
       coalesce((SELECT nullif(rolconnlimit, -1) FROM pg_roles WHERE rolname = session_user), 0),
       pg_has_role(session_user, 'pg_read_all_stats', 'USAGE');

-- section: missing rights
-- Rights of sql/roles.sql that the role of this session lacks. That a table or column is not there is no
-- matter of rights.
SELECT string_agg(DISTINCT w.privilege || coalesce(' (' || w.cols || ')', ''), ', ') || ' ON ' || w.relation
FROM (SELECT relation, privilege, string_agg(col, ', ' ORDER BY col) AS cols FROM (VALUES
    ('outbox_events', 'SELECT', NULL), ('outbox_events', 'DELETE', NULL),
    ('outbox_events', 'UPDATE', 'attempts'), ('outbox_events', 'UPDATE', 'processed_at'),
    ('outbox_events', 'UPDATE', 'retry_after'), ('outbox_events', 'UPDATE', 'last_error'),
    ('outbox_events', 'UPDATE', 'dead_at'),
    ('outbox_dead_letters', 'SELECT', NULL),
    ('outbox_relay_state', 'SELECT', NULL), ('outbox_relay_state', 'UPDATE', NULL),
    ('outbox_suspects', 'SELECT', NULL), ('outbox_suspects', 'INSERT', NULL),
    ('outbox_suspects', 'UPDATE', NULL), ('outbox_suspects', 'DELETE', NULL)) v (relation, privilege, col)
    LEFT JOIN pg_attribute a ON a.attrelid = to_regclass(v.relation) AND a.attname = v.col AND NOT a.attisdropped
    WHERE NOT coalesce(CASE WHEN v.col IS NULL THEN has_table_privilege(to_regclass(v.relation), v.privilege)
                            ELSE has_column_privilege(a.attrelid, a.attnum, v.privilege) END, true)
    GROUP BY relation, privilege) w
GROUP BY w.relation ORDER BY w.relation;

-- section: power
-- Whether the role of this session is a superuser, and whether it is or may become the owner of the table with oid $1.
SELECT rolsuper, NOT rolsuper AND pg_has_role(oid, (SELECT relowner FROM pg_class WHERE oid = $1::bigint::oid), 'MEMBER')
FROM pg_roles WHERE rolname = session_user;

-- section: application rights
-- Logins that may insert events into the table with oid $1, as applications do, and what they may do with it besides:
-- reading back an id is meant. Superusers and whoever may act as the owner can do all, and are not looked at.
SELECT l.rolname::text, l.more
FROM (SELECT r.rolname, concat_ws(', ',
          CASE WHEN has_table_privilege(r.oid, c.oid, 'SELECT')
                    OR EXISTS (SELECT FROM pg_attribute a WHERE a.attrelid = c.oid AND a.attnum > 0 AND NOT a.attisdropped
                                 AND a.attname <> 'id' AND has_column_privilege(r.oid, c.oid, a.attnum, 'SELECT')) THEN 'SELECT' END,
          CASE WHEN has_any_column_privilege(r.oid, c.oid, 'UPDATE') THEN 'UPDATE' END,
          CASE WHEN has_table_privilege(r.oid, c.oid, 'DELETE') THEN 'DELETE' END,
          CASE WHEN has_table_privilege(r.oid, c.oid, 'TRUNCATE') THEN 'TRUNCATE' END,
          CASE WHEN has_table_privilege(r.oid, c.oid, 'TRIGGER') THEN 'TRIGGER' END) AS more
      FROM pg_roles r, pg_class c
      WHERE c.oid = $1::bigint::oid AND r.rolcanlogin AND NOT r.rolsuper
        AND has_any_column_privilege(r.oid, c.oid, 'INSERT') AND NOT pg_has_role(r.oid, c.relowner, 'MEMBER')) l
WHERE l.more <> '' ORDER BY 1 LIMIT 10;

-- section: table
-- The table with oid $1: rows and sizes, vacuum, the trigger, and what numbers the events.
SELECT coalesce(s.n_live_tup, 0), coalesce(s.n_dead_tup, 0), greatest(s.last_vacuum, s.last_autovacuum),
       pg_table_size(c.oid), coalesce(pg_relation_size(to_regclass('outbox_events_fresh')), 0),
       coalesce('autovacuum_enabled=false' = ANY (c.reloptions), false),
       coalesce((SELECT tgenabled::text FROM pg_trigger WHERE tgrelid = c.oid AND tgname = 'outbox_notify'), ''),
       EXISTS (SELECT FROM pg_subscription_rel WHERE srrelid = c.oid),
       coalesce((SELECT seqcache FROM pg_sequence
                 WHERE seqrelid = (SELECT d.objid FROM pg_depend d
                                   JOIN pg_attribute a ON a.attrelid = d.refobjid AND a.attnum = d.refobjsubid
                                   WHERE d.classid = 'pg_class'::regclass AND d.deptype = 'i'
                                     AND d.refobjid = c.oid AND a.attname = 'seq')), 1)
FROM pg_class c LEFT JOIN pg_stat_all_tables s ON s.relid = c.oid
WHERE c.oid = $1::bigint::oid;

-- section: old transactions
-- What has kept a snapshot or a transaction id for over $1 seconds: vacuum removes nothing that became
-- dead since. Sessions of other roles are seen with pg_read_all_stats only.
SELECT format('session with pid %s (user %s, application_name "%s", %s)', pid, usename, application_name, state),
       extract(epoch FROM clock_timestamp() - xact_start)::float8,
       format('psql -c "SELECT pg_terminate_backend(%s)"', pid)
FROM pg_stat_activity
WHERE xact_start < clock_timestamp() - $1 * interval '1 second' AND pid <> pg_backend_pid()
  AND backend_type = 'client backend' AND (backend_xmin IS NOT NULL OR backend_xid IS NOT NULL)
UNION ALL
SELECT format('prepared transaction %s (owner %s, database %s)', quote_literal(gid), owner, database),
       extract(epoch FROM clock_timestamp() - prepared)::float8,
       format('psql -d %s -c "ROLLBACK PREPARED %s", or COMMIT PREPARED', quote_ident(database), quote_literal(gid))
FROM pg_prepared_xacts WHERE prepared < clock_timestamp() - $1 * interval '1 second'
ORDER BY 2 DESC LIMIT 10;

-- section: old slots
-- Replication slots and standbys that keep rows which were removed over $1 transactions ago.
SELECT format('replication slot %s%s', quote_literal(slot_name), CASE WHEN active THEN '' ELSE ', which nobody reads' END),
       age(xmin), format('psql -c "SELECT pg_drop_replication_slot(%s)" if it is not needed', quote_literal(slot_name))
FROM pg_replication_slots WHERE age(xmin) > $1
UNION ALL
SELECT format('standby "%s" (hot_standby_feedback)', application_name), age(backend_xmin),
       'end old queries on that standby'
FROM pg_stat_replication WHERE age(backend_xmin) > $1
ORDER BY 2 DESC LIMIT 10;

-- section: failures
-- What failed events last failed of, by the outcome at the beginning of last_error, in how many different words, and
-- an example. $1: how many events are looked at.
SELECT split_part(f.last_error, ':', 1), count(*), count(DISTINCT f.last_error), min(f.last_error)
FROM (SELECT last_error FROM outbox_events
      WHERE processed_at IS NULL AND (retry_after IS NOT NULL OR dead_at IS NOT NULL) LIMIT $1) f
WHERE f.last_error IS NOT NULL
GROUP BY 1 ORDER BY 2 DESC LIMIT 10;

-- section: notify
SELECT pg_notify($1, '');
