package chaos

import "outbox-relay/internal/testenv"

type server func(*chaos) *testenv.Container

func postgresServer(c *chaos) *testenv.Container { return c.postgres.Container }
func rabbitmqServer(c *chaos) *testenv.Container { return c.rabbitmq.Container }

func restart(of server) func(*chaos, bool) func() {
	return func(c *chaos, _ bool) func() {
		of(c).Stop(c.t)
		return c.lasting(longest/2, func() { of(c).Start(c.t) })
	}
}

func kill(of server) func(*chaos, bool) func() {
	return func(c *chaos, _ bool) func() {
		of(c).Kill(c.t)
		return c.lasting(longest/2, func() { of(c).Start(c.t) })
	}
}

func pause(of server) func(*chaos, bool) func() {
	return func(c *chaos, _ bool) func() {
		of(c).Pause(c.t)
		return c.lasting(longest, func() { of(c).Unpause(c.t) })
	}
}

// readOnly is what a demoted primary looks like: sessions live on, and every write is refused.
func readOnly(c *chaos, _ bool) func() {
	// ALTER SYSTEM is no write to PostgreSQL; it needs a statement of its own.
	set := func(query string) {
		testenv.Exec(c.t, c.postgres.DSN, query)
		testenv.Exec(c.t, c.postgres.DSN, `SELECT pg_reload_conf()`)
	}
	set(`ALTER SYSTEM SET default_transaction_read_only = on`)
	return c.lasting(longest/2, func() { set(`ALTER SYSTEM RESET default_transaction_read_only`) })
}

// Conditions on pg_stat_activity, for terminate.
const (
	workingSession = `pid IN (SELECT pid FROM pg_locks WHERE locktype = 'advisory' AND mode = 'ExclusiveLock' AND granted)`
	// The last statement of a listener is LISTEN, or the empty one of a ping.
	listeningSession = `(query ILIKE 'listen%' OR query IN ('', ';'))`
	allSessions      = `true`

	sessions = ` FROM pg_stat_activity WHERE application_name = 'outbox-relay' AND `
)

func terminate(which string) func(*chaos, bool) func() {
	return func(c *chaos, _ bool) func() {
		c.times(func() {
			testenv.Query[bool](c.t, c.postgres.DSN, `SELECT pg_terminate_backend(pid)`+sessions+which)
		})
		return nil
	}
}

// closeConnections is what an operator does; the consumer's go as well.
func closeConnections(c *chaos, _ bool) func() {
	c.rabbitmq.Ctl(c.t, "close_all_connections", "chaos")
	return nil
}

func memoryAlarm(c *chaos, _ bool) func() {
	c.rabbitmq.Ctl(c.t, "set_vm_memory_high_watermark", "absolute", "1MB")
	return c.lasting(longest/2, func() { c.rabbitmq.Ctl(c.t, "set_vm_memory_high_watermark", "0.6") })
}
