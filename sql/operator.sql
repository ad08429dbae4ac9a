-- What the commands for people ask and do, each in a section of its own.

-- section: settings
-- Nothing that a person asks for may hold others up.
SET statement_timeout = '10s';
SET lock_timeout = '2s';
SET idle_in_transaction_session_timeout = '30s';
SET default_transaction_isolation = 'read committed';

-- section: facts
-- Which outbox is this, and who asks?
SELECT to_regclass('outbox_events')::oid::bigint,
       (SELECT relnamespace::regnamespace::text FROM pg_class WHERE oid = to_regclass('outbox_events')),
       session_user, current_setting('server_version_num')::int,
       pg_is_in_recovery(), to_regclass('outbox_relay_state') IS NOT NULL;
