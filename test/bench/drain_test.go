package bench

import (
	"net"
	"strconv"
	"testing"
	"time"

	amqp "github.com/rabbitmq/amqp091-go"

	"outbox-relay/internal/boundedconn"
	"outbox-relay/internal/testenv"
)

// batch says what is sent: events numbered from 0, where event n is of aggregate n % aggregates.
type batch struct {
	events, aggregates int
	bytes              int    // of a payload
	queueType          string // "" is classic
}

// backlog is a measurement of how long events take that appear at once, from their commit to the last
// delivery, and of what the relay needs for it.
type backlog struct {
	batch
	start   publisher
	prepare func(*testing.T, outbox) // before the start; may be nil
	emptied bool                     // it ends when the relay has deleted all events again
}

func (b backlog) measure(t *testing.T) figures {
	o := newOutbox(t)
	if b.prepare != nil {
		b.prepare(t, o)
	}
	c := consume(t, o, b.batch)
	relay := b.start(t, o)
	db := testenv.DB(t, o.dsn)
	tx, err := db.BeginTx(t.Context(), nil)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = tx.Rollback() }()
	_, err = tx.ExecContext(t.Context(), `INSERT INTO outbox_events (aggregate_type, aggregate_id, event_type, payload)
		SELECT '`+aggregateType+`', n % $2::int, '`+eventType+`', jsonb_build_object('n', n, 'pad', $3::text)
		FROM generate_series(0, $1::int - 1) n ORDER BY n`, b.events, b.aggregates, padding(b.bytes))
	if err != nil {
		t.Fatal(err)
	}
	var cpu, rss float64
	var looked time.Duration
	look := func() {
		if relay != nil && now()-looked > time.Second/2 {
			looked = now()
			rss = max(rss, relay.Metric(t, "process_resident_memory_bytes"))
		}
	}
	if relay != nil {
		cpu = relay.Metric(t, "process_cpu_seconds_total")
	}
	const position = `SELECT (pg_current_wal_lsn() - '0/0')::float8`
	wal := testenv.Value[float64](t, o.dsn, position)
	begun := now()
	if err := tx.Commit(); err != nil {
		t.Fatal(err)
	}
	c.await(t, look)
	if n := c.disordered.Load(); n > 0 {
		t.Errorf("%d events came out of order", n)
	}
	o.settled(t)
	f := figures{"rate": float64(b.events) / (time.Duration(c.last.Load()) - begun).Seconds()}
	if relay != nil {
		f["cpu_us"] = (relay.Metric(t, "process_cpu_seconds_total") - cpu) / float64(b.events) * 1e6
		f["rss_mb"] = rss / 1e6
	}
	if b.emptied {
		testenv.Eventually(t, 5*time.Minute, "the table is empty", func() bool {
			return !testenv.Value[bool](t, o.dsn, `SELECT EXISTS (SELECT FROM outbox_events)`)
		})
	}
	f["wal_bytes"] = (testenv.Value[float64](t, o.dsn, position) - wal) / float64(b.events)
	f["table_mb"] = testenv.Value[float64](t, o.dsn, `SELECT pg_total_relation_size('outbox_events')::float8`) / 1e6
	return f
}

// ceiling publishes a batch with confirms, and no database: no relay that has one can be faster. It is
// a good publisher: messages are made before the clock starts, many share a write to the socket, and
// the next ones go out when half of those before are confirmed. RabbitMQ holds up who sends more than
// it has given credit for, 400 at first. Tried, in thousands a second: 13, 15, 16, 17, 14 and 13 with
// 50, 100, 200, 300, 400 and 1,000 unconfirmed, and 13.5 with 200 and a write to the socket each.
func ceiling(b batch) measure {
	return func(t *testing.T) figures {
		o := outbox{amqpURL: testenv.Vhost(t)}
		c := consume(t, o, b)
		var link *boundedconn.Conn
		conn, err := amqp.DialConfig(o.amqpURL, amqp.Config{Dial: func(network, addr string) (net.Conn, error) {
			raw, err := amqp.DefaultDial(5*time.Second)(network, addr)
			link = boundedconn.New(raw, 0, 10*time.Second)
			return link, err
		}})
		if err != nil {
			t.Fatal(err)
		}
		defer func() { _ = conn.CloseDeadline(time.Now().Add(5 * time.Second)) }()
		ch := channel(t, conn)
		if err := ch.Confirm(false); err != nil {
			t.Fatal(err)
		}
		messages := make([]amqp.Publishing, b.events)
		pad := padding(b.bytes)
		for n := range messages {
			messages[n] = message(uuid(n), strconv.Itoa(n%b.aggregates), []byte(body(n, pad)))
		}

		const window = 256
		begun := now()
		var flying []*amqp.DeferredConfirmation
		for n := 0; n < b.events; {
			link.Cork()
			for ; n < b.events && len(flying) < window; n++ {
				confirm, err := ch.PublishWithDeferredConfirm(exchange, eventType, true, false, messages[n])
				if err != nil {
					t.Fatal(err)
				}
				flying = append(flying, confirm)
			}
			if err := link.Uncork(); err != nil {
				t.Fatal(err)
			}
			keep := window / 2
			if n == b.events {
				keep = 0
			}
			for len(flying) > keep {
				if ok, err := flying[0].WaitContext(t.Context()); !ok || err != nil {
					t.Fatalf("confirmed %t, %v", ok, err)
				}
				flying = flying[1:]
			}
		}
		c.await(t, nil)
		return figures{"rate": float64(b.events) / (time.Duration(c.last.Load()) - begun).Seconds()}
	}
}
