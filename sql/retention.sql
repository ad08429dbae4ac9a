-- What deletes processed events once they are older than RETENTION, each statement in a section
-- of its own. It runs in a session of its own, after the settings of session.sql.

-- section: table
-- Which table it is, and how many blocks there are to walk.
SELECT c.oid::bigint, pg_relation_size(c.oid) / current_setting('block_size')::bigint
FROM pg_class c
WHERE c.oid = to_regclass('outbox_events');

-- section: try
-- Of several relays one at a time deletes.
SELECT pg_try_advisory_lock({{.Class}}, {{.Key}});

-- section: delete
-- Deletes old processed events of some blocks of the table.
--
--   $1  the first place to look at, '(block,0)'                   tid
--   $2  the place to stop before, '(block,0)'                     tid
--   $3  processed at least this many milliseconds ago             bigint
--   $4  rows at most                                              bigint
--
-- No index finds old events, because every settle would have to write it. A Tid Range Scan reads
-- just these blocks, and rows are deleted by their place in the table. Locked rows are passed
-- over until the next pass. An event that is pending or dead has no processed_at.
--
-- Returns the rows deleted and the last block with any.
WITH deleted AS (
    DELETE FROM outbox_events
    WHERE ctid = ANY (ARRAY(
              SELECT ctid FROM outbox_events
              WHERE ctid >= $1::tid AND ctid < $2::tid
                AND processed_at < now() - $3::bigint * interval '1 ms'
              LIMIT $4::bigint
              FOR UPDATE SKIP LOCKED))
      AND processed_at IS NOT NULL -- said twice: this must never touch a pending row
    RETURNING ctid
)
SELECT count(*), coalesce(max((ctid::text::point)[0]), 0)::bigint FROM deleted;
