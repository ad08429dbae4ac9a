-- settle: marks what became of events, in one commit. Returns how many confirmed
-- events it marked, and the ids of the failed ones it changed.{{if .Remove}} Confirmed
-- events are deleted instead of marked.{{end}}
--
--   $1  confirmed                                              uuid[]
--   $2  failed, and for each of them:                          uuid[]
--   $3    attempts it had when it was claimed                  int[]
--   $4    attempts it has now                                  int[]
--   $5    retry in this many milliseconds                      bigint[]
--   $6    dead if at least this many milliseconds old, or NULL bigint[]
--   $7    why; empty leaves what is there                      text[]
--   $8  return only when it is on disk                         boolean
--
-- By the primary key. Never marks a row twice, and counts no failure that somebody else has
-- counted or forgiven meanwhile: whoever woke up late changes nothing. {{if .SkipLocked}}Rows that another session
-- has locked are passed over.{{else}}It waits for a locked row as long as lock_timeout allows.{{end}}
WITH confirmed AS (
    {{if .Remove}}DELETE FROM outbox_events{{else}}UPDATE outbox_events SET processed_at = clock_timestamp(), dead_at = NULL{{end}}
    WHERE id = ANY ({{if .SkipLocked}}ARRAY(
              SELECT id FROM outbox_events WHERE id = ANY ($1::uuid[]) AND processed_at IS NULL
              FOR UPDATE SKIP LOCKED){{else}}$1::uuid[]{{end}})
      AND processed_at IS NULL
    RETURNING 1
), failures AS MATERIALIZED (
    SELECT f.* FROM unnest($2::uuid[], $3::int[], $4::int[], $5::bigint[], $6::bigint[], $7::text[])
        AS f (id, claimed, attempts, retry_ms, dead_ms, reason)
{{if .SkipLocked}}    JOIN outbox_events e USING (id)
    FOR UPDATE OF e SKIP LOCKED
{{end}}), failed AS (
    UPDATE outbox_events e
    SET attempts = f.attempts,
        last_error = coalesce(nullif(f.reason, ''), e.last_error),
        (dead_at, retry_after) = (
            SELECT CASE WHEN dead THEN clock_timestamp() END,
                   CASE WHEN NOT dead THEN clock_timestamp() + f.retry_ms * interval '1 ms' END
            -- At once whatever created_at says, which is the application's: it may lie in the future.
            FROM (SELECT coalesce(f.dead_ms = 0 OR e.created_at <= clock_timestamp() - f.dead_ms * interval '1 ms', false) AS dead) d)
    FROM failures f
    WHERE e.id = f.id AND e.processed_at IS NULL AND e.dead_at IS NULL AND e.attempts = f.claimed
    RETURNING e.id
)
SELECT (SELECT count(*) FROM confirmed), ARRAY(SELECT id::text FROM failed),
       CASE WHEN $8::boolean THEN set_config('synchronous_commit', 'on', true) END -- until the end of this transaction
