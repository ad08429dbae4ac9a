-- What `outbox-relay dead-letters` asks and does, each in a section of its own.

-- section: clock
SELECT clock_timestamp();

-- section: matching
-- Which dead letters are meant; a part of the statements below. A parameter that is NULL asks for
-- nothing. Statements are planned with their values, so only the conditions that are left count:
-- ids are found by the primary key, all else in outbox_events_blocking.
--
--   $1  ids             uuid[]
--   $2  event type      text
--   $3  aggregate type  text
--   $4  aggregate id    text
--   $5  a part of last_error, upper or lower case   text
--   $6  dead since      timestamptz
--   $7  dead until      timestamptz
processed_at IS NULL AND (retry_after IS NOT NULL OR dead_at IS NOT NULL) AND dead_at IS NOT NULL
      AND ($1::uuid[] IS NULL OR id = ANY ($1))
      AND ($2::text IS NULL OR event_type = $2)
      AND ($3::text IS NULL OR aggregate_type = $3)
      AND ($4::text IS NULL OR aggregate_id = $4)
      AND ($5::text IS NULL OR strpos(lower(last_error), lower($5)) > 0)
      AND ($6::timestamptz IS NULL OR dead_at >= $6)
      AND ($7::timestamptz IS NULL OR dead_at <= $7)

-- section: count
SELECT count(*) FROM outbox_events
WHERE {{.Matching}};

-- section: list
-- $8: rows at most, NULL for all.
SELECT id::text, seq, aggregate_type, aggregate_id, event_type, attempts,
       to_json(date_trunc('second', created_at)) #>> '{}', to_json(date_trunc('second', dead_at)) #>> '{}',
       coalesce(last_error, '')
FROM outbox_events
WHERE {{.Matching}}
ORDER BY dead_at DESC, seq DESC
LIMIT $8::bigint;

-- section: show
-- Any event by its id, whatever became of it.
SELECT id::text, seq, aggregate_type, aggregate_id, event_type, attempts,
       to_json(created_at) #>> '{}', to_json(processed_at) #>> '{}', to_json(retry_after) #>> '{}',
       to_json(dead_at) #>> '{}', last_error, headers::text, payload::text
FROM outbox_events
WHERE id = $1::uuid;

-- section: portion
-- The next dead letters to change, in the order of their aggregates and within these in their own.
-- Locks them, and leaves out what others have locked: two persons at once share the work.
--
--   $8 to $12  the last one of the portion before: aggregate type and id, seq, created_at, id; NULL at first
--   $13        rows at most   bigint
SELECT aggregate_type, aggregate_id, seq, created_at::text, id::text
FROM outbox_events
WHERE {{.Matching}}
      AND ($8::text IS NULL OR
           (aggregate_type, aggregate_id, seq, created_at, id) > ($8, $9::text, $10::bigint, $11::timestamptz, $12::uuid))
ORDER BY aggregate_type, aggregate_id, seq, created_at, id
LIMIT $13::bigint
FOR UPDATE SKIP LOCKED;

-- section: retry
-- Makes dead letters events that never failed. last_error stays: it says what happened, and one that
-- closed a channel is published alone again.
UPDATE outbox_events SET attempts = 0, retry_after = NULL, dead_at = NULL
WHERE id = ANY ($1::uuid[]) AND dead_at IS NOT NULL AND processed_at IS NULL;

-- section: discard
-- Takes dead letters off the list for good: nothing publishes them any more, and RETENTION deletes
-- them like published events. dead_at stays, and tells them from those. $2: who did it.
UPDATE outbox_events
SET processed_at = clock_timestamp(), last_error = concat_ws(': ', 'discarded by ' || $2::text, last_error)
WHERE id = ANY ($1::uuid[]) AND dead_at IS NOT NULL AND processed_at IS NULL;

-- section: release
-- Has the relay look at everything, because these events and those that wait for them are below its
-- low-water mark, and wakes it when the transaction commits. $1: oid of outbox_events, as text.
WITH released AS (UPDATE outbox_relay_state SET released = released + 1)
SELECT pg_notify('outbox_event', $1);
