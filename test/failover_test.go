package test

import (
	"net/url"
	"strings"
	"testing"

	amqp "github.com/rabbitmq/amqp091-go"

	"outbox-relay/internal/testenv"
)

// hostList is one DSN for several servers, of which the one that takes writes is used.
func hostList(t *testing.T, servers ...*testenv.Postgres) string {
	t.Helper()
	var list *url.URL
	var hosts, ports []string
	for _, s := range servers {
		u, err := url.Parse(s.DSN)
		if err != nil {
			t.Fatal(err)
		}
		list, hosts, ports = u, append(hosts, u.Hostname()), append(ports, u.Port())
	}
	q := list.Query()
	q.Set("port", strings.Join(ports, ","))
	q.Set("target_session_attrs", "read-write")
	q.Set("connect_timeout", "2")
	list.Host, list.RawQuery = strings.Join(hosts, ","), q.Encode()
	return list.String()
}

// The primary is lost and its standby takes over: the relay finds it by the list of hosts, as
// the application does, and goes on without a restart. Replication is synchronous, so what was
// committed is there.
func TestFailOverToAStandbyBehindAHostList(t *testing.T) {
	t.Parallel()
	primary := testenv.OwnPostgres(t, testenv.Options{})
	standby := primary.Standby(t)
	o := outboxOn(t, hostList(t, primary, standby), testenv.Vhost(t))
	q := testenv.Consume(t, o.amqpURL, exchange)
	const batch = 200
	p := o.start(t, "BATCH_SIZE=200")
	p.Ready(t)
	l := o.startLoad(t)
	waitPublished(t, p, 100)
	primary.Kill(t)
	p.NotReady(t)
	standby.Promote(t)
	p.Ready(t)
	waitPublished(t, p, 100)
	l.stop()
	o.dsn = standby.DSN
	o.verify(t, q, l.rolledBack, batch*3/2)
}

// The server refuses writes, as one does that was demoted: the session is given up, and the relay
// goes on with the server that takes them.
func TestServerThatBecameReadOnlyIsLeft(t *testing.T) {
	t.Parallel()
	primary := testenv.OwnPostgres(t, testenv.Options{})
	standby := primary.Standby(t)
	o := outboxOn(t, hostList(t, primary, standby), testenv.Vhost(t))
	q := testenv.Consume(t, o.amqpURL, exchange)
	p := o.start(t)
	p.Ready(t)
	o.insertMany(t, 100, 10, "order.created")
	waitCount(t, q, 100)
	testenv.Exec(t, primary.DSN, "ALTER SYSTEM SET default_transaction_read_only = on")
	testenv.Exec(t, primary.DSN, "ALTER SYSTEM SET synchronous_standby_names = ''")
	testenv.Exec(t, primary.DSN, "SELECT pg_reload_conf()")
	standby.Promote(t)
	late := &outbox{dsn: standby.DSN, amqpURL: o.amqpURL, db: testenv.DB(t, standby.DSN)}
	late.insertMany(t, 100, 10, "order.changed")
	waitCount(t, q, 200)
	p.Ready(t)
	if n := late.count(t, "attempts > 0"); n > 0 {
		t.Errorf("%d events have a failed attempt", n)
	}
}

// The node that the relay is connected to, which also leads the quorum queue, is lost. The relay goes
// on with the next of its list.
func TestNodeOfAClusterIsLost(t *testing.T) {
	t.Parallel()
	nodes := testenv.RabbitMQCluster(t, 3)
	var urls []string
	for _, n := range nodes {
		urls = append(urls, n.URL)
	}
	o := outboxOn(t, testenv.Database(t), strings.Join(urls, ","))
	// Declared at the first node, which so becomes its leader; consumed at the last.
	conn, err := amqp.Dial(nodes[0].URL)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = conn.Close() }()
	ch, err := conn.Channel()
	if err != nil {
		t.Fatal(err)
	}
	quorum := amqp.Table{"x-queue-type": "quorum", "x-quorum-initial-group-size": int32(3)}
	if _, err := ch.QueueDeclare("orders", true, false, false, false, quorum); err != nil {
		t.Fatal(err)
	}
	q := testenv.ConsumeFrom(t, nodes[2].URL, testenv.Binding{Exchange: exchange, Queue: "orders", Args: quorum})
	const batch = 200
	// The queue's next leader is found within seconds; on a busy machine it takes longer.
	p := o.start(t, "BATCH_SIZE=200", "CONFIRM_TIMEOUT=40s", "SHUTDOWN_TIMEOUT=50s")
	p.Ready(t)
	l := o.startLoad(t)
	waitPublished(t, p, 100)
	nodes[0].Kill(t)
	waitPublished(t, p, 200)
	p.Ready(t)
	nodes[0].Start(t)
	waitPublished(t, p, 100)
	l.stop()
	o.verify(t, q, l.rolledBack, batch*3/2)
	if n := p.Metric(t, "outbox_reconnects_total", `server="rabbitmq"`); n == 0 {
		t.Error("the relay was not connected to the node that was lost")
	}
}
