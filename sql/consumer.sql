-- For the database of a consumer: which messages it has dealt with. Idempotent.
--
-- Delivery is at least once, and every delivery of an event carries the same message-id. So a
-- consumer does both in one transaction of its own: it enters the id, and has its effect only if
-- the id was new.
--
--     BEGIN;
--     INSERT INTO processed_events (message_id) VALUES ('<message-id>') ON CONFLICT DO NOTHING;
--     -- 1 row inserted: have the effect here, in this transaction
--     -- 0 rows: seen before, nothing to do
--     COMMIT;
--     -- then ack the message, in either case
--
-- Enter first: of two deliveries at the same time, the second INSERT waits until the first
-- transaction has ended, and goes ahead only if that was rolled back. An ack before the commit could
-- lose the event; a crash between commit and ack costs one more delivery, which is dropped here.
--
-- Several consumers that share a database need a table each, or a column for the consumer's name
-- in the primary key.
CREATE TABLE IF NOT EXISTS processed_events (
    message_id   UUID        PRIMARY KEY,
    processed_at TIMESTAMPTZ NOT NULL DEFAULT now()
);

-- Old entries can go once no delivery of theirs can come any more: keep them for longer than the
-- relay keeps events that it could send again, a week say.
--
--     DELETE FROM processed_events WHERE processed_at < now() - interval '7 days';
