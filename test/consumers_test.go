package test

import (
	"context"
	"strings"
	"testing"

	amqp "github.com/rabbitmq/amqp091-go"

	"outbox-relay/internal/testenv"
)

// Partitioned consumption as docs/consumers.md describes it: the routing key is the aggregate's id, and the
// consistent-hash exchange gives each aggregate to one queue, in its order.
func TestConsistentHashExchangeKeepsAnAggregateInOneQueue(t *testing.T) {
	t.Parallel()
	mq := testenv.OwnRabbitMQ(t, testenv.Options{})
	mq.Exec(t, "rabbitmq-plugins", "enable", "rabbitmq_consistent_hash_exchange")
	o := outboxOn(t, testenv.Database(t), mq.URL)
	var queues []*testenv.Queue
	for range 3 { // the key of a binding is its weight
		queues = append(queues, testenv.ConsumeFrom(t, mq.URL, testenv.Binding{
			Exchange: "partitioned", ExchangeType: "x-consistent-hash", Keys: []string{"1"},
		}))
	}
	p := o.start(t, "AMQP_EXCHANGE=partitioned", "AMQP_EXCHANGE_TYPE=x-consistent-hash", "AMQP_ROUTING_KEY={aggregate_id}")
	p.Ready(t)
	const n, aggregates = 2000, 100
	o.insertMany(t, n, aggregates, "order.created")
	received := func() (all int) {
		for _, q := range queues {
			all += len(q.Received())
		}
		return all
	}
	testenv.Eventually(t, patience, "all events are delivered", func() bool { return received() >= n })

	committed := o.committed(t)
	queueOf, last := make(map[string]int), make(map[string]int64)
	for i, q := range queues {
		if len(q.Received()) == 0 {
			t.Errorf("queue %d got nothing", i)
		}
		for _, d := range q.Received() {
			e := committed[d.MessageId]
			if other, ok := queueOf[e.aggregate]; ok && other != i {
				t.Fatalf("aggregate %s is in the queues %d and %d", e.aggregate, other, i)
			}
			if e.seq < last[e.aggregate] {
				t.Errorf("aggregate %s: seq %d after %d", e.aggregate, e.seq, last[e.aggregate])
			}
			queueOf[e.aggregate], last[e.aggregate] = i, e.seq
		}
	}
	if len(queueOf) != aggregates {
		t.Errorf("%d aggregates were delivered, want %d", len(queueOf), aggregates)
	}
}

// Of several consumers of a queue with a single active consumer one gets everything, in order, and the next
// goes on when it ends.
func TestSingleActiveConsumerKeepsTheOrder(t *testing.T) {
	t.Parallel()
	o := newOutbox(t)
	ch := o.channel(t)
	if err := ch.ExchangeDeclare(exchange, "topic", true, false, false, false, nil); err != nil {
		t.Fatal(err)
	}
	args := amqp.Table{"x-single-active-consumer": true, "x-queue-type": "quorum"}
	if _, err := ch.QueueDeclare("orders", true, false, false, false, args); err != nil {
		t.Fatal(err)
	}
	if err := ch.QueueBind("orders", "#", exchange, false, nil); err != nil {
		t.Fatal(err)
	}
	var consumers []*amqp.Channel
	var deliveries []<-chan amqp.Delivery
	for range 2 {
		c := o.channel(t)
		if err := c.Qos(1, 0, false); err != nil {
			t.Fatal(err)
		}
		ds, err := c.Consume("orders", "", false, false, false, false, nil)
		if err != nil {
			t.Fatal(err)
		}
		consumers, deliveries = append(consumers, c), append(deliveries, ds)
	}
	o.start(t).Ready(t)
	o.insertMany(t, 60, 3, "order.created")

	committed, seen, last := o.committed(t), make(map[string]bool), make(map[string]int64)
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	for len(seen) < 60 {
		if len(seen) == 30 && !consumers[0].IsClosed() {
			if err := consumers[0].Close(); err != nil {
				t.Fatal(err)
			}
		}
		active := 0
		if consumers[0].IsClosed() {
			active = 1
		}
		select {
		case d := <-deliveries[active]:
			e := committed[d.MessageId]
			if e.seq < last[e.aggregate] && !seen[d.MessageId] {
				t.Errorf("aggregate %s: seq %d after %d", e.aggregate, e.seq, last[e.aggregate])
			}
			last[e.aggregate] = e.seq
			seen[d.MessageId] = true
			if err := d.Ack(false); err != nil {
				t.Fatal(err)
			}
		case <-ctx.Done():
			t.Fatalf("%d of 60 events", len(seen))
		}
	}
}

// The transaction of docs/consumers.md: the id is entered first, so of two deliveries at the same time
// one has its effect, also when the first is rolled back.
func TestConsumersTransactionDropsCopies(t *testing.T) {
	t.Parallel()
	dsn := testenv.Database(t)
	db := testenv.DB(t, dsn)
	testenv.Exec(t, dsn, readFile(t, "../sql/consumer.sql"))
	testenv.Exec(t, dsn, "CREATE TABLE balance (amount int); INSERT INTO balance VALUES (0)")
	statements := consumerStatements(t)
	const id = "0190d2f0-0000-7000-8000-000000000001"
	for _, commitFirst := range []bool{false, true, true} { // rolled back, new, a copy
		first, err := db.BeginTx(t.Context(), nil)
		if err != nil {
			t.Fatal(err)
		}
		entered, err := first.Exec(statements[0], id)
		if err != nil {
			t.Fatal(err)
		}
		second := make(chan error, 1)
		go func() {
			second <- func() error {
				tx, err := db.Begin()
				if err != nil {
					return err
				}
				defer func() { _ = tx.Rollback() }()
				res, err := tx.Exec(statements[0], id) // waits for the first
				if err != nil {
					return err
				}
				if n, _ := res.RowsAffected(); n == 1 {
					if _, err := tx.Exec(statements[1]); err != nil {
						return err
					}
					if !commitFirst {
						return nil // rolled back as well, so that the next round begins anew
					}
				}
				return tx.Commit()
			}()
		}()
		if n, _ := entered.RowsAffected(); n == 1 {
			if _, err := first.Exec(statements[1]); err != nil {
				t.Fatal(err)
			}
		}
		if commitFirst {
			err = first.Commit()
		} else {
			err = first.Rollback()
		}
		if err != nil {
			t.Fatal(err)
		}
		if err := <-second; err != nil {
			t.Fatal(err)
		}
	}
	if amount := testenv.Value[int](t, dsn, "SELECT amount FROM balance"); amount != 1 {
		t.Errorf("the effect was had %d times, want once", amount)
	}
}

// consumerStatements are the insert and the effect of the example in docs/consumers.md.
func consumerStatements(t *testing.T) []string {
	t.Helper()
	text := readFile(t, "../docs/consumers.md")
	var found []string
	for _, begin := range []string{"INSERT INTO processed_events", "UPDATE balance"} {
		i := strings.Index(text, begin)
		if i < 0 {
			t.Fatalf("docs/consumers.md has no %q", begin)
		}
		statement, _, _ := strings.Cut(text[i:], ";")
		found = append(found, statement)
	}
	return found
}
