-- The outbox for Go programs that use sqlc, and for anybody with psql. The relay itself does not use
-- these; writers need the first one only. Each names the index it uses and the locks it takes.

-- name: InsertEvent :one
-- Writes an event; call it in the transaction that changes the data, after the change, so that the
-- lock on what changed puts the events of one aggregate in order.
INSERT INTO outbox_events (aggregate_type, aggregate_id, event_type, payload, headers)
VALUES ($1, $2, $3, $4, $5)
RETURNING id;

-- name: FetchBatch :many
-- Events that never failed, in the order of publishing, at most $1. Index outbox_events_fresh. Locks
-- the rows until the transaction ends; rows that others have locked are left out, so this gives
-- no order between several readers.
SELECT id, seq, aggregate_type, aggregate_id, event_type, payload, headers, attempts, created_at
FROM outbox_events
WHERE processed_at IS NULL AND dead_at IS NULL AND retry_after IS NULL
ORDER BY seq, created_at, id
LIMIT $1
FOR UPDATE SKIP LOCKED;

-- name: FetchDueRetries :many
-- Events that failed and are due again, at most $1. Index outbox_events_retry. Locks as above.
SELECT id, seq, aggregate_type, aggregate_id, event_type, payload, headers, attempts, created_at
FROM outbox_events
WHERE processed_at IS NULL AND dead_at IS NULL AND retry_after IS NOT NULL AND retry_after <= now()
ORDER BY retry_after
LIMIT $1
FOR UPDATE SKIP LOCKED;

-- name: MarkProcessed :execrows
-- Marks events as published. Primary key; locks the rows. Safe to repeat.
UPDATE outbox_events SET processed_at = now()
WHERE id = ANY($1::uuid[]) AND processed_at IS NULL;

-- name: MarkFailed :execrows
-- Counts a failed attempt of event $1 with error $2: due again after $3 seconds, doubled with each
-- attempt, at most $4 seconds; dead after $5 attempts. Primary key; locks the row.
UPDATE outbox_events SET
    attempts = attempts + 1,
    last_error = $2,
    retry_after = now() + least($3::float8 * 2 ^ least(attempts, 30), $4::float8) * interval '1 second',
    dead_at = CASE WHEN attempts + 1 >= $5::int THEN now() END
WHERE id = $1 AND processed_at IS NULL AND dead_at IS NULL;

-- name: CountPending :one
-- How many events wait: fresh ones and retries, each counted in its index. Reads all of both.
SELECT (SELECT count(*) FROM outbox_events
        WHERE processed_at IS NULL AND dead_at IS NULL AND retry_after IS NULL)
     + (SELECT count(*) FROM outbox_events
        WHERE processed_at IS NULL AND dead_at IS NULL AND retry_after IS NOT NULL);

-- name: ListDeadLetters :many
-- Events given up, at most $1, the latest first. Index outbox_events_blocking.
SELECT id, seq, aggregate_type, aggregate_id, event_type, payload, headers, attempts, created_at, last_error, dead_at
FROM outbox_dead_letters
ORDER BY dead_at DESC
LIMIT $1;

-- name: RetryDeadLetter :execrows
-- Makes a dead letter an event that never failed; the relay finds it within FALLBACK_INTERVAL. Not
-- with ON_DEAD_LETTER=hold: there `outbox-relay dead-letters retry` keeps the order. Primary key;
-- locks the row.
UPDATE outbox_events SET attempts = 0, retry_after = NULL, last_error = NULL, dead_at = NULL
WHERE id = $1 AND dead_at IS NOT NULL AND processed_at IS NULL;
