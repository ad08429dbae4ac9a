-- backlog: what is pending (neither processed nor dead), how old its oldest event is in seconds,
-- how many dead letters there are, and how many aggregates have events that wait behind a failed one, a
-- dead one included if $1 says that those hold: among the 10,000 that wait longest, which they are
-- since others go out. Over the three partial indexes alone, so its cost grows with
-- what is pending and never with what was processed; the planner is denied other ways.
SELECT (SELECT count(*) FROM outbox_events WHERE processed_at IS NULL AND dead_at IS NULL AND retry_after IS NULL)
     + (SELECT count(*) FROM outbox_events WHERE processed_at IS NULL AND dead_at IS NULL AND retry_after IS NOT NULL),
       coalesce(extract(epoch FROM clock_timestamp() - least(
           (SELECT created_at FROM outbox_events
            WHERE processed_at IS NULL AND dead_at IS NULL AND retry_after IS NULL
            ORDER BY seq, created_at, id LIMIT 1),
           (SELECT min(created_at) FROM outbox_events
            WHERE processed_at IS NULL AND dead_at IS NULL AND retry_after IS NOT NULL)))::float8, 0),
       (SELECT count(*) FROM outbox_events
        WHERE processed_at IS NULL AND (retry_after IS NOT NULL OR dead_at IS NOT NULL) AND dead_at IS NOT NULL),
       (SELECT count(DISTINCT (e.aggregate_type, e.aggregate_id))
        FROM (SELECT aggregate_type, aggregate_id, seq, created_at, id FROM outbox_events
              WHERE processed_at IS NULL AND dead_at IS NULL AND retry_after IS NULL
              ORDER BY seq, created_at, id LIMIT 10000) e
        WHERE (SELECT true FROM outbox_events b
               WHERE b.processed_at IS NULL AND (b.retry_after IS NOT NULL OR b.dead_at IS NOT NULL)
                 AND b.aggregate_type = e.aggregate_type AND b.aggregate_id = e.aggregate_id
                 AND (b.seq, b.created_at, b.id) < (e.seq, e.created_at, e.id)
                 AND (b.dead_at IS NULL OR $1::boolean)
               LIMIT 1));
