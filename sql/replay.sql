-- What `outbox-relay replay` asks, each in a section of its own. It only reads.

-- section: blocks
-- How many blocks of the table there are to walk.
SELECT pg_relation_size(to_regclass('outbox_events')) / current_setting('block_size')::bigint;

-- section: positions
-- Which published events of some blocks of the table are meant. No index finds them, because every
-- settle would have to write it. A Tid Range Scan reads just these blocks, so that no statement
-- takes long or holds vacuum back. Discarded dead letters were never published.
--
--   $1  ids               uuid[]        each of these is NULL to ask for nothing
--   $2  event type        text
--   $3  aggregate type    text
--   $4  aggregate id      text
--   $5  published since   timestamptz
--   $6  published until   timestamptz
--   $7  the first place to look at, '(block,0)'     tid
--   $8  the place to stop before, '(block,0)'       tid
SELECT seq, (extract(epoch FROM created_at) * 1000000)::bigint, id::text, processed_at
FROM outbox_events
WHERE ctid >= $7::tid AND ctid < $8::tid
  AND processed_at IS NOT NULL AND dead_at IS NULL
  AND ($1::uuid[] IS NULL OR id = ANY ($1))
  AND ($2::text IS NULL OR event_type = $2)
  AND ($3::text IS NULL OR aggregate_type = $3)
  AND ($4::text IS NULL OR aggregate_id = $4)
  AND ($5::timestamptz IS NULL OR processed_at >= $5)
  AND processed_at <= $6::timestamptz;

-- section: events
-- Events by their ids, in the order of these; those that were deleted meanwhile are left out.
SELECT e.id::text, e.seq, e.aggregate_type, e.aggregate_id, e.event_type, {{.Payload}}, e.headers::text, e.attempts,
       CASE WHEN isfinite(e.created_at) THEN (extract(epoch FROM e.created_at) * 1000000)::bigint END
FROM unnest($1::uuid[]) WITH ORDINALITY AS wanted (id, n)
JOIN outbox_events e USING (id)
WHERE e.processed_at IS NOT NULL
ORDER BY n;

-- section: payload type
SELECT atttypid::regtype::text FROM pg_attribute
WHERE attrelid = to_regclass('outbox_events') AND attname = 'payload' AND NOT attisdropped;
