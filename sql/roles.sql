-- Least privilege: two group roles for one outbox. Idempotent. Run it as the owner of the tables,
-- who may create roles, with the outbox's schema first in search_path:
--
--     psql -1 -v ON_ERROR_STOP=1 -f roles.sql
--     psql -c "GRANT outbox_app TO shop" -c "GRANT outbox_relay TO relay"
--
-- Neither role may change the schema: `outbox-relay migrate` runs as the owner. The trigger runs
-- with the writer's rights and needs none besides the INSERT, and neither does the sequence
-- behind seq, because it belongs to an identity column.

DO $roles$
DECLARE
    role_name text;
BEGIN
    FOREACH role_name IN ARRAY ARRAY['outbox_app', 'outbox_relay'] LOOP
        BEGIN
            EXECUTE format('CREATE ROLE %I NOLOGIN', role_name);
        EXCEPTION WHEN duplicate_object OR unique_violation THEN
            NULL; -- roles belong to the whole server: another outbox has made it, or does so right now
        END;
        EXECUTE format('GRANT USAGE ON SCHEMA %I TO %I', current_schema(), role_name);
    END LOOP;
END
$roles$;

-- The application writes events. It cannot read them back, change them or take them away;
-- SELECT (id) is for RETURNING id and ON CONFLICT (id).
GRANT INSERT (id, aggregate_type, aggregate_id, event_type, payload, headers), SELECT (id)
    ON outbox_events TO outbox_app;

-- The relay reads events, settles them, and deletes processed ones (RETENTION). It cannot write
-- events of its own, nor change what one says.
GRANT SELECT, DELETE, UPDATE (attempts, processed_at, retry_after, last_error, dead_at)
    ON outbox_events TO outbox_relay;
GRANT SELECT ON outbox_dead_letters TO outbox_relay;
GRANT SELECT, UPDATE ON outbox_relay_state TO outbox_relay;
GRANT SELECT, INSERT, UPDATE, DELETE ON outbox_suspects TO outbox_relay;

-- Optional, for a superuser to give: when a session of somebody else is in the relay's way, it can
-- then say not only which, but since when.
--
--     GRANT pg_read_all_stats TO outbox_relay;
