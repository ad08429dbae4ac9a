-- claim: the events to publish next, in order, bounded in rows and in bytes, with what the relay
-- must know to claim again: whether there is more, how far the outbox was seen, when the next
-- retry is due. First a row with these facts as JSON and nothing else, then one for each event.
-- Columns that rarely say anything are NULL then.
--
--   $1  low-water mark: fresh rows with a seq up to it are known to be dealt with   bigint
--   $2  rows at most                                                                int
--   $3  payload bytes at most; one event is claimed in any case                     bigint
--   $4  payloads over this many bytes are not loaded                                bigint
--   $5  ids in hand: claimed before and not settled yet                             uuid[]
--   $6  dead letters hold their aggregate back                                      boolean
--
-- Indexes: outbox_events_fresh in its own order from $1 on, outbox_events_retry by time, and
-- outbox_events_blocking for each candidate. It takes no lock when ordered: the caller alone
-- works the outbox. Unordered, it locks what it returns and passes over what others locked.
--
-- The order of an aggregate rests on this: a row is passed over while an earlier one of its
-- aggregate has failed and is not processed, due or not. Once that one is confirmed (or dead
-- and not holding) the caller moves the mark back below it.
--
-- Ids in hand are a sub-select, and earlier failures a scalar one, because the planner makes a hash
-- table of the first and an index scan of the second whatever it believes about the table. As
-- <> ALL and NOT EXISTS they become a scan of the array, and of all failed events, for each row.
-- For fresh rows the earliest failure is a join, so that the planner may remember it (Memoize) for
-- all that wait behind it.
--
-- Blind, it returns neither payload nor headers. The payload is taken in the form in which its
-- bytes go out: as text, or bytea as it is.
WITH {{if .Ordered}}blocking AS MATERIALIZED (
    SELECT EXISTS (SELECT FROM outbox_events
                   WHERE processed_at IS NULL AND (retry_after IS NOT NULL OR dead_at IS NOT NULL)) AS "any"
), {{end}}retries AS MATERIALIZED (
    SELECT e.id, e.seq, e.created_at, e.aggregate_type, e.aggregate_id, e.event_type, e.payload,
           e.headers, e.attempts, e.last_error
    FROM outbox_events e
    WHERE e.processed_at IS NULL AND e.dead_at IS NULL AND e.retry_after <= now()
      AND e.id NOT IN (SELECT unnest($5::uuid[]))
{{if .Ordered}}      AND (SELECT true FROM outbox_events b
           WHERE b.processed_at IS NULL AND (b.retry_after IS NOT NULL OR b.dead_at IS NOT NULL)
             AND b.aggregate_type = e.aggregate_type AND b.aggregate_id = e.aggregate_id
             AND (b.seq, b.created_at, b.id) < (e.seq, e.created_at, e.id)
             AND (b.dead_at IS NULL OR $6)
           LIMIT 1) IS NULL
{{end}}    ORDER BY e.retry_after
    LIMIT ($2::int + 1) / 2 -- a crowd of failing events leaves room for fresh ones
{{if not .Ordered}}    FOR UPDATE OF e SKIP LOCKED
{{end}}), fresh AS MATERIALIZED (
    SELECT e.id, e.seq, e.created_at, e.aggregate_type, e.aggregate_id, e.event_type, e.payload,
           e.headers, e.attempts, e.last_error
    FROM outbox_events e
{{if .Ordered}}    LEFT JOIN LATERAL (
        SELECT b.seq, b.created_at, b.id FROM outbox_events b
        WHERE (SELECT "any" FROM blocking)
          AND b.processed_at IS NULL AND (b.retry_after IS NOT NULL OR b.dead_at IS NOT NULL)
          AND b.aggregate_type = e.aggregate_type AND b.aggregate_id = e.aggregate_id
          AND (b.dead_at IS NULL OR $6)
        ORDER BY b.seq, b.created_at, b.id
        LIMIT 1) b ON true
{{end}}    WHERE e.processed_at IS NULL AND e.dead_at IS NULL AND e.retry_after IS NULL
      AND e.seq > $1::bigint
      AND e.id NOT IN (SELECT unnest($5::uuid[]))
{{if .Ordered}}      AND (b.seq IS NULL OR (b.seq, b.created_at, b.id) > (e.seq, e.created_at, e.id))
{{end}}    ORDER BY e.seq, e.created_at, e.id
    LIMIT $2::int
{{if not .Ordered}}    FOR UPDATE OF e SKIP LOCKED
{{end}}), candidates AS (
    -- A cheap bound on the bytes first, so that only what may be returned is unpacked: the size
    -- as stored, and twenty times that where it is compressed.
    SELECT c.*, row_number() OVER w AS n,
           sum(pg_column_size(c.payload)
               * CASE WHEN pg_column_compression(c.payload) IS NULL THEN 1 ELSE 20 END) OVER w AS stored
    FROM (SELECT true AS retry, * FROM retries UNION ALL SELECT false, * FROM fresh) c
    WINDOW w AS (ORDER BY NOT c.retry, c.seq, c.created_at, c.id ROWS UNBOUNDED PRECEDING)
), loaded AS (
    SELECT n, retry, id, seq, created_at, aggregate_type, aggregate_id, event_type,
           {{if .Blind}}NULL::{{.PayloadType}} AS body, NULL::text AS headers{{else}}{{.Payload}} AS body, headers::text AS headers{{end}}, attempts, last_error
    FROM candidates
    WHERE n <= $2::int AND (n = 1 OR stored <= $3::bigint)
    OFFSET 0 -- keeps the conversion of a payload from being done twice
), measured AS (
    SELECT *, octet_length(body) AS bytes, octet_length(body) > $4::bigint AS oversized,
           sum(CASE WHEN octet_length(body) <= $4::bigint THEN octet_length(body) ELSE 0 END
               + coalesce(octet_length(headers), 0)) OVER (ORDER BY n ROWS UNBOUNDED PRECEDING) AS total
    FROM loaded
)
SELECT json_build_object(
           'highest', (SELECT max(seq) FROM outbox_events
                       WHERE processed_at IS NULL AND dead_at IS NULL AND retry_after IS NULL AND seq > $1::bigint),
           'retries', (SELECT count(*) FROM retries),
           'fresh', (SELECT count(*) FROM fresh),
           'retry_ms', (SELECT (extract(epoch FROM min(retry_after) - clock_timestamp()) * 1000)::bigint FROM outbox_events
                        WHERE processed_at IS NULL AND dead_at IS NULL AND retry_after IS NOT NULL AND retry_after > now()),
           'released', (SELECT released FROM outbox_relay_state),
           'xmin', pg_snapshot_xmin(pg_current_snapshot())::text::bigint,
           'xmax', pg_snapshot_xmax(pg_current_snapshot())::text::bigint)::text AS facts,
       NULL::text AS id, NULL::bigint AS seq, NULL::text AS aggregate_type, NULL::text AS aggregate_id,
       NULL::text AS event_type, NULL::{{.PayloadType}} AS body, NULL::bigint AS oversized_bytes, NULL::text AS headers,
       NULL::int AS attempts, NULL::bigint AS created_us, NULL::boolean AS retry, NULL::boolean AS isolate
UNION ALL
SELECT NULL, id::text, seq, aggregate_type, aggregate_id, event_type,
       CASE WHEN oversized THEN NULL ELSE body END, CASE WHEN oversized THEN bytes END, headers, attempts,
       CASE WHEN isfinite(created_at) THEN (extract(epoch FROM created_at) * 1000000)::bigint END,
       NULLIF(retry, false), NULLIF(starts_with(last_error, 'rejected: the broker closed the channel'), false)
FROM measured
WHERE n = 1 OR total <= $3::bigint
