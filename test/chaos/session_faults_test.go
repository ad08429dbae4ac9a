package chaos

import (
	"fmt"
	"time"

	"outbox-relay/internal/testenv"
)

// freezeBackend stops the server's side of sessions: their connections live, and nothing answers. A
// frozen holder of the work lock keeps it: only the server could take it away.
func freezeBackend(which string, longest time.Duration) func(*chaos, bool) func() {
	return func(c *chaos, _ bool) func() {
		c.active() // somebody works, and so there is a working session
		var pids []string
		for _, pid := range testenv.Query[int](c.t, c.postgres.DSN, `SELECT pid`+sessions+which) {
			pids = append(pids, fmt.Sprint(pid))
		}
		signal := func(name string) {
			if len(pids) > 0 {
				// One that has ended meanwhile is no fault.
				c.postgres.Exec(c.t, append([]string{"sh", "-c", `kill -"$0" "$@" || true`, name}, pids...)...)
			}
		}
		signal("STOP")
		return c.lasting(longest, func() { signal("CONT") })
	}
}

// freezeListener makes the relay deaf for up to longer than it believes in a silent listener.
// Events leave by the fallback poll meanwhile.
func freezeListener(c *chaos, alone bool) func() {
	end := freezeBackend(listeningSession, 32*time.Second)(c, alone)
	if alone {
		c.mustFlow("no session hears notifications")
	}
	return end
}

// mustFlow sees events delivered although something is broken, within FALLBACK_INTERVAL and what a
// busy machine adds.
func (c *chaos) mustFlow(while string) {
	c.t.Helper()
	const within = 5*time.Second + 3*time.Second
	if _, _, ok := c.await(time.Now(), within); !ok {
		c.violation("while %s, no event was delivered within %v", while, within)
	}
}

// flood sends more notifications than any buffer holds, each different, lest the server folds them.
func flood(c *chaos, _ bool) func() {
	for range 5 {
		testenv.Exec(c.t, c.postgres.DSN, `SELECT count(pg_notify('outbox_event', i::text)) FROM generate_series(1, 4000) i`)
	}
	return nil
}

// lockRows is somebody who holds locks on pending rows again and again.
func lockRows(c *chaos, _ bool) func() {
	for range 30 {
		testenv.Exec(c.t, c.postgres.DSN, fmt.Sprintf(`
			BEGIN;
			SELECT FROM outbox_events WHERE processed_at IS NULL LIMIT 1000 FOR UPDATE SKIP LOCKED;
			SELECT pg_sleep(%f);
			COMMIT`, c.between(20*time.Millisecond, 400*time.Millisecond).Seconds()))
	}
	return nil
}

// lockTable is a VACUUM FULL or an ALTER TABLE that takes its time.
func lockTable(c *chaos, _ bool) func() {
	testenv.Exec(c.t, c.postgres.DSN, fmt.Sprintf(`
		BEGIN;
		LOCK TABLE outbox_events IN ACCESS EXCLUSIVE MODE;
		SELECT pg_sleep(%f);
		COMMIT`, c.between(500*time.Millisecond, 8*time.Second).Seconds()))
	return nil
}
