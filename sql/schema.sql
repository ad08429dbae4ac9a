-- The outbox: one table, its indexes, the trigger that wakes the relay, and the relay's own
-- state. PostgreSQL 14 and later. Idempotent. All names are unqualified: everything is created
-- in the first schema of search_path, so one database can hold several outboxes.
--
-- `outbox-relay migrate` applies this file and also upgrades older tables in place, with traffic.
-- A new outbox can as well be made by hand:
--
--     psql -1 -v ON_ERROR_STOP=1 -f schema.sql
--
-- Lines that begin with "-- section:" name the parts that migrate applies one by one.

-- section: events
-- An application writes an event in the transaction that changes its data:
--
--     INSERT INTO outbox_events (aggregate_type, aggregate_id, event_type, payload)
--     VALUES ('order', '42', 'order.created', '{"total": 10}');
--
-- State of a row: processed_at set: published and confirmed. dead_at set: given up, waits for a
-- person; both: discarded by a person. retry_after set: failed before, due again at that time. None
-- of them: to be published.
-- The payload may also be declared JSON, TEXT or BYTEA.
CREATE TABLE IF NOT EXISTS outbox_events (
    id             UUID         PRIMARY KEY DEFAULT gen_random_uuid(), -- becomes the message-id
    aggregate_type VARCHAR(100) NOT NULL,
    aggregate_id   VARCHAR(100) NOT NULL,
    event_type     VARCHAR(100) NOT NULL,
    payload        JSONB        NOT NULL,                              -- the message's body
    attempts       INT          NOT NULL DEFAULT 0,                    -- failures counted so far
    created_at     TIMESTAMPTZ  NOT NULL DEFAULT now(),                -- start of the writer's transaction
    processed_at   TIMESTAMPTZ,
    -- The order of events. Not created_at: that is the start of the transaction, so of two
    -- transactions that change one aggregate one after the other the later may carry the earlier
    -- time, and the events of one transaction all tie. 0 in rows older than the column. Its
    -- sequence must not be given a CACHE: each session would then number its events from a
    -- block of its own, and the order would be lost.
    seq            BIGINT       NOT NULL GENERATED ALWAYS AS IDENTITY,
    headers        JSONB,                                              -- an object: the message's headers
    retry_after    TIMESTAMPTZ,
    last_error     TEXT,                                               -- why the last attempt failed
    dead_at        TIMESTAMPTZ
);

-- section: indexes
-- Besides the primary key, by which rows are settled. All three are partial and hold pending
-- rows only, so they stay small whatever the table's size. A writer's INSERT pays for the
-- primary key and the first of them; the other two are written when an event has failed. Tried,
-- 200,000 rows in one statement: 1.9 s with the primary key alone, 2.2 s with the first as well,
-- and the same with all of them.

-- The claim walks this one in the order of publishing: rows that never failed, or were reset.
-- Rows arrive at its right-hand end and leave it when they are settled or fail.
CREATE INDEX IF NOT EXISTS outbox_events_fresh ON outbox_events (seq, created_at, id)
    WHERE processed_at IS NULL AND dead_at IS NULL AND retry_after IS NULL;

-- Failed events that are due again, and the time of the next one.
CREATE INDEX IF NOT EXISTS outbox_events_retry ON outbox_events (retry_after)
    WHERE processed_at IS NULL AND dead_at IS NULL AND retry_after IS NOT NULL;

-- Failed and dead events by aggregate: does one hold back the events behind it? It also finds
-- the dead letters.
CREATE INDEX IF NOT EXISTS outbox_events_blocking ON outbox_events (aggregate_type, aggregate_id, seq)
    WHERE processed_at IS NULL AND (retry_after IS NOT NULL OR dead_at IS NOT NULL);

-- section: doorbell
-- Wakes the relay. While the relay sleeps it holds the doorbell lock of the table exclusively,
-- and every commit rings. While it is awake and polls it has given the lock up; writers then
-- get it shared and stay silent, because a commit that carries a NOTIFY takes a lock of the
-- whole server until it is flushed: such commits run one after another.
--
-- A writer keeps its share until its transaction ends, and the relay must have the lock
-- exclusively before it sleeps: an event that nobody announced is never slept on.
--
-- A transaction that is to be prepared (two-phase commit) may neither notify nor keep such a
-- lock for ever. Under
--     SET LOCAL outbox.notify = 'off';
-- the trigger does nothing, and the relay's fallback poll finds the event.
--
-- Names are qualified instead of a SET search_path on the function, which would cost every call.
CREATE OR REPLACE FUNCTION outbox_notify() RETURNS trigger LANGUAGE plpgsql AS $outbox$
BEGIN
    IF pg_catalog.current_setting('outbox.notify', true) = 'off' THEN
        RETURN NULL;
    END IF;
    -- 1868719468 is the class of the doorbell lock ('obel'); embed.go has the others. An oid
    -- over 2^31 becomes a negative integer with the same bits, so no two tables share a lock.
    IF NOT pg_catalog.pg_try_advisory_xact_lock_shared(1868719468, TG_RELID::pg_catalog.int4) THEN
        PERFORM pg_catalog.pg_notify('outbox_event', TG_RELID::pg_catalog.text);
    END IF;
    RETURN NULL;
END
$outbox$;

-- FOR EACH STATEMENT: an INSERT of 10,000 rows rings once.
CREATE OR REPLACE TRIGGER outbox_notify AFTER INSERT ON outbox_events
    FOR EACH STATEMENT EXECUTE FUNCTION outbox_notify();

-- section: dead letters
CREATE OR REPLACE VIEW outbox_dead_letters AS
    SELECT id, aggregate_type, aggregate_id, event_type, payload, attempts, created_at,
           processed_at, seq, headers, retry_after, last_error, dead_at
    FROM outbox_events
    WHERE dead_at IS NOT NULL AND processed_at IS NULL;

-- section: state
-- What the relay knows about itself, in one row: shown by `outbox-relay status`.
CREATE TABLE IF NOT EXISTS outbox_relay_state (
    singleton     BOOLEAN PRIMARY KEY DEFAULT true CHECK (singleton),
    leader        TEXT,                           -- the relay that works, or did last
    leader_since  TIMESTAMPTZ,
    clean         BOOLEAN NOT NULL DEFAULT true,  -- the last leader ended in order
    deaths        INT     NOT NULL DEFAULT 0,     -- unclean ends in a row
    released      BIGINT  NOT NULL DEFAULT 0,     -- how often dead letters were retried or discarded
    paused_at     TIMESTAMPTZ,                    -- NULL: not paused
    paused_by     TEXT,
    last_error    TEXT,
    last_error_at TIMESTAMPTZ
);
INSERT INTO outbox_relay_state DEFAULT VALUES ON CONFLICT (singleton) DO NOTHING;

-- Events that were in hand when a relay died uncleanly. Rows appear only while the relay looks
-- for the one that kills it.
CREATE TABLE IF NOT EXISTS outbox_suspects (
    id         UUID PRIMARY KEY,                  -- of the event
    deaths     INT  NOT NULL,                     -- how often it was taken in hand: once more than a relay died of it
    claimed_at TIMESTAMPTZ
);

-- section: autovacuum
-- Every event leaves one dead row version behind, and dead entries in the index that the claim
-- walks. The defaults (a fifth of the table) let these pile up by the million once processed
-- rows are kept for a while. A hundredth, and no pauses in the work. Tried with a million processed
-- rows: an empty claim takes 0.13 ms with 15,000 dead entries before it, 0.85 ms with 75,000, and
-- 0.03 ms after the vacuum, which takes 0.05 to 0.2 s. More often would not help: below 2 % of the
-- pages vacuum leaves indexes alone. Values set by hand are left alone by migrate.
ALTER TABLE outbox_events SET (
    autovacuum_vacuum_scale_factor = 0.01,
    autovacuum_vacuum_threshold = 5000,
    autovacuum_vacuum_cost_delay = 0,
    autovacuum_analyze_scale_factor = 0.05,
    autovacuum_analyze_threshold = 5000
);
