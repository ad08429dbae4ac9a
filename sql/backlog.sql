-- backlog: what is pending (neither processed nor dead), how old its oldest event is in seconds,
-- how many dead letters there are, and how many aggregates a failed event holds back, a dead one
-- included if $1 says that those hold. Over the three partial indexes alone, so its cost grows with
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
       (SELECT count(*) FROM (SELECT DISTINCT aggregate_type, aggregate_id FROM outbox_events
                              WHERE processed_at IS NULL AND (retry_after IS NOT NULL OR dead_at IS NOT NULL)
                                AND (dead_at IS NULL OR $1::boolean)) held);
