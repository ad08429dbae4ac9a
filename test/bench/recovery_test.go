package bench

import (
	"database/sql"
	"testing"
	"time"

	amqp "github.com/rabbitmq/amqp091-go"

	"outbox-relay/internal/loadtest"
	"outbox-relay/internal/testenv"
)

// installation is servers of its own, which may be stopped, with two relays under a continuous load.
type installation struct {
	postgres *testenv.Postgres
	rabbitmq *testenv.RabbitMQ
	leader   *testenv.Process
}

// fault breaks something, for that long if it is an outage, and returns when it was broken and when it
// was mended.
type fault func(t *testing.T, in installation, outage time.Duration) (broken, mended time.Time)

// recovery measures the time from the end of a fault to the delivery of an event that was written
// after its beginning.
func recovery(f fault, outage time.Duration) measure {
	return func(t *testing.T) figures {
		in := installation{postgres: testenv.OwnPostgres(t, testenv.Options{}), rabbitmq: testenv.OwnRabbitMQ(t, testenv.Options{})}
		o := outbox{dsn: in.postgres.DSN, amqpURL: in.rabbitmq.URL}
		o.migrate(t)
		consumer := loadtest.Consume(t, o.amqpURL, exchange)
		oracle := loadtest.NewOracle(t, o.dsn, consumer)
		in.leader = startRelay()(t, o)
		startRelay()(t, o)
		load := loadtest.Start(t, loadtest.Config{DSN: o.dsn, Writers: 4, Aggregates: 40, Pause: 10 * time.Millisecond})
		testenv.Eventually(t, time.Minute, "events are delivered", func() bool { return consumer.Count() > 100 })

		broken, mended := f(t, in, outage)
		var next time.Duration
		testenv.Eventually(t, time.Minute, "an event is delivered", func() bool {
			for _, d := range consumer.Received(0) {
				if asked, ok := load.Asked(d.ID); ok && asked.After(broken) {
					next = max(0, d.At.Sub(mended))
					return true
				}
			}
			return false
		})
		load.Hold()
		defer load.Release()
		verdict, err := oracle.Check(t.Context(), patience)
		if err != nil {
			t.Fatal(err)
		}
		for _, fault := range verdict.Faults() {
			t.Error(fault)
		}
		return figures{"next_s": next.Seconds()}
	}
}

func leaderKilled(t *testing.T, in installation, _ time.Duration) (broken, mended time.Time) {
	t.Helper()
	in.leader.Kill(t)
	dead := time.Now()
	return dead, dead
}

func brokerRestarted(t *testing.T, in installation, outage time.Duration) (broken, mended time.Time) {
	t.Helper()
	return restart(t, in.rabbitmq.Container, outage, func() error {
		conn, err := amqp.DialConfig(in.rabbitmq.URL, amqp.Config{Dial: amqp.DefaultDial(time.Second)})
		if err != nil {
			return err
		}
		return conn.Close()
	})
}

func databaseRestarted(t *testing.T, in installation, outage time.Duration) (broken, mended time.Time) {
	t.Helper()
	return restart(t, in.postgres.Container, outage, func() error {
		db, err := sql.Open("postgres", in.postgres.DSN+"&connect_timeout=1")
		if err != nil {
			return err
		}
		defer db.Close()
		return db.PingContext(t.Context())
	})
}

// restart stops a server for that long. It is back when ask first succeeds.
func restart(t *testing.T, server *testenv.Container, outage time.Duration, ask func() error) (stopped, back time.Time) {
	t.Helper()
	server.Stop(t)
	stopped = time.Now()
	time.Sleep(outage)
	answered := make(chan time.Time, 1)
	go func() {
		for ask() != nil && t.Context().Err() == nil {
			time.Sleep(10 * time.Millisecond)
		}
		answered <- time.Now()
	}()
	server.Start(t)
	return stopped, <-answered
}

// idle measures what the relay costs while nothing happens.
func idle(length time.Duration) measure {
	return func(t *testing.T) figures {
		o := newOutbox(t)
		consume(t, o, batch{})
		relay := startRelay()(t, o)
		testenv.Eventually(t, time.Minute, "the relay sleeps", func() bool {
			return relay.Metric(t, "outbox_doorbell_state", `state="asleep"`) == 1
		})
		transactions := o.transactions(t)
		cpu := relay.Metric(t, "process_cpu_seconds_total")
		begun := now()
		time.Sleep(length)
		spent := relay.Metric(t, "process_cpu_seconds_total") - cpu
		took := (now() - begun).Seconds()
		return figures{
			"cpu_ms":       spent / took * 1000,
			"transactions": (o.transactions(t) - transactions) / took,
			"rss_mb":       relay.Metric(t, "process_resident_memory_bytes") / 1e6,
		}
	}
}
