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
       pg_is_in_recovery(),
       -- Of the form that the relay works with: it has the columns, and the relay's own table is there.
       to_regclass('outbox_relay_state') IS NOT NULL AND 6 = (
           SELECT count(*) FROM pg_attribute WHERE attrelid = to_regclass('outbox_events') AND NOT attisdropped
           AND attname IN ('aggregate_type', 'payload', 'attempts', 'processed_at', 'seq', 'dead_at'));
