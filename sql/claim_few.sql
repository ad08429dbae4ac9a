-- claim few: what claim.sql returns when there is little to claim and nothing has failed, which is most of the
-- time. It takes the server half as long, most of which is starting the plan, and an event waits for it. It
-- claims nothing if it cannot be sure: "declined" is true then, or there is no row, and claim.sql is to be asked.
--
--   $1  low-water mark: fresh rows with a seq up to it are known to be dealt with   bigint
--   $2  rows at most; one more declines                                             int
--   $3  stored bytes of a payload or its headers at most; more declines             int
--   $4  dead letters hold their aggregate back                                      boolean
--
-- The columns are those of claim.sql, with facts in columns behind them. Ids in hand are returned too.
-- One row at least, since the facts are wanted in any case.
SELECT NULL AS facts, e.id::text, e.seq, e.aggregate_type, e.aggregate_id, e.event_type,
       CASE WHEN e.small THEN e.{{.Payload}} END AS body, NULL::bigint AS oversized_bytes,
       CASE WHEN e.small THEN e.headers::text END AS headers, e.attempts,
       CASE WHEN isfinite(e.created_at) THEN (extract(epoch FROM e.created_at) * 1000000)::bigint END AS created_us,
       NULL::boolean AS retry, NULLIF(starts_with(e.last_error, 'rejected: the broker closed the channel'), false) AS isolate,
       s.released, pg_snapshot_xmin(pg_current_snapshot())::text::bigint AS xmin, pg_snapshot_xmax(pg_current_snapshot())::text::bigint AS xmax,
       NOT coalesce(e.small, true)
       OR (SELECT true FROM outbox_events WHERE processed_at IS NULL AND dead_at IS NULL AND retry_after IS NOT NULL
           ORDER BY retry_after LIMIT 1) IS NOT NULL -- the order chooses the index, which holds no dead letters
       OR $4 AND EXISTS (SELECT FROM outbox_events WHERE processed_at IS NULL AND dead_at IS NOT NULL) AS declined
FROM outbox_relay_state s
LEFT JOIN (
    SELECT *, pg_column_size(payload) <= $3::int AND coalesce(pg_column_size(headers), 0) <= $3::int AS small
    FROM outbox_events
    WHERE processed_at IS NULL AND dead_at IS NULL AND retry_after IS NULL AND seq > $1::bigint
    ORDER BY seq, created_at, id
    LIMIT $2::int + 1) e ON true
