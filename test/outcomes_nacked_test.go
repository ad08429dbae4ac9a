package test

import (
	"testing"
	"time"

	amqp "github.com/rabbitmq/amqp091-go"

	"outbox-relay/internal/testenv"
)

// fullQueue binds events of type "refused" to a queue that takes only a few of them and refuses more.
func (o *outbox) fullQueue(t *testing.T, length int) *testenv.Queue {
	t.Helper()
	return testenv.ConsumeFrom(t, o.amqpURL, testenv.Binding{
		Exchange: exchange, Keys: []string{"refused"}, Hold: true,
		Args: amqp.Table{"x-max-length": length, "x-overflow": "reject-publish"},
	})
}

// drain receives from q what is and comes there, until n messages have come, and returns how often
// each came.
func (o *outbox) drain(t *testing.T, q *testenv.Queue, n int) map[string]int {
	t.Helper()
	ds, err := o.channel(t).Consume(q.Name, "", true, false, false, false, nil)
	if err != nil {
		t.Fatal(err)
	}
	var all []amqp.Delivery
	deadline := time.After(patience)
	for len(all) < n {
		select {
		case d := <-ds:
			all = append(all, d)
		case <-deadline:
			t.Fatalf("%d messages drained, want %d", len(all), n)
		}
	}
	select {
	case d := <-ds:
		t.Errorf("event %s came beyond the %d", d.MessageId, n)
	case <-time.After(200 * time.Millisecond):
	}
	return deliveries(all)
}

// A full queue is a condition that passes: below DEAD_AFTER it makes no dead letters, however
// often an event is refused.
func TestRefusedEventsAreDeliveredWhenTheQueueIsDrained(t *testing.T) {
	t.Parallel()
	bothOrderings(t, func(t *testing.T, ordering string) {
		const n, length, maxAttempts = 100, 10, 3
		o := newOutbox(t)
		full := o.fullQueue(t, length)
		q := testenv.Consume(t, o.amqpURL, exchange, neighbour)
		p := o.start(t, ordering, "RETRY_BASE=50ms", "RETRY_MAX=300ms", "MAX_ATTEMPTS="+itoa(maxAttempts))
		p.Ready(t)
		o.insertNeighbours(t, 50)
		o.insertMany(t, n, n, "refused")
		o.insertNeighbours(t, 50)

		const refused = "event_type = 'refused' AND processed_at IS NULL"
		testenv.Eventually(t, patience, "all that was refused was refused more than MAX_ATTEMPTS times", func() bool {
			return o.count(t, refused) > 0 && o.count(t, refused+" AND attempts <= "+itoa(maxAttempts)) == 0
		})
		if n := o.count(t, "dead_at IS NOT NULL"); n != 0 {
			t.Errorf("%d dead letters of a full queue, want none before DEAD_AFTER", n)
		}
		for _, reason := range testenv.Query[string](t, o.dsn, `SELECT DISTINCT last_error FROM outbox_events WHERE `+refused) {
			wantReason(t, "last_error", reason, "nacked", "the broker refused the message")
		}
		if taken := o.count(t, "event_type = 'refused' AND processed_at IS NOT NULL"); taken < length || taken > n/2 {
			t.Errorf("%d events processed, want about as many as the queue takes, %d", taken, length)
		}
		o.wantNeighbours(t, q, 1)

		if copies := o.drain(t, full, n); len(copies) != n {
			t.Errorf("%d events were drained, want %d", len(copies), n)
		}
		o.waitRowCount(t, "processed_at IS NULL", 0)
		attempts := testenv.Value[int](t, o.dsn, `SELECT sum(attempts) FROM outbox_events`)
		if got := outcomes(t, p, "nacked"); got != attempts {
			t.Errorf("%d nacks counted by the metric, want the rows' %d attempts", got, attempts)
		}
		wantFailures(t, p, "refused", attempts)
		wantConnectionKept(t, p)
	})
}

func TestRefusedEventBecomesADeadLetterWhenItIsOld(t *testing.T) {
	t.Parallel()
	bothOrderings(t, func(t *testing.T, ordering string) {
		o := newOutbox(t)
		full := o.fullQueue(t, 1)
		q := testenv.Consume(t, o.amqpURL, exchange, neighbour)
		p := o.start(t, ordering, "RETRY_BASE=50ms", "RETRY_MAX=200ms", "MAX_ATTEMPTS=2", "DEAD_AFTER=2s")
		p.Ready(t)
		first := o.insert(t, event{aggregate: "a", eventType: "refused"})[0]
		o.waitProcessed(t, first)
		id := o.insert(t, event{aggregate: "b", eventType: "refused"})[0]
		o.insertNeighbours(t, 100)

		r := o.waitDead(t, id)
		o.wantDeadLetter(t, id, r.attempts, "nacked", "the broker refused the message")
		if r.attempts <= 2 {
			t.Errorf("dead after %d attempts, want more than MAX_ATTEMPTS by then", r.attempts)
		}
		age := testenv.Value[float64](t, o.dsn, `SELECT extract(epoch FROM dead_at - created_at) FROM outbox_events WHERE id = $1`, id)
		if age < 2 {
			t.Errorf("dead at an age of %v s, want DEAD_AFTER, 2 s, at least", age)
		}
		o.wantNeighbours(t, q, 1)
		if copies := o.drain(t, full, 1); copies[first] != 1 {
			t.Errorf("drained %v, want %s only", copies, first)
		}
		if got := outcomes(t, p, "nacked"); got != r.attempts {
			t.Errorf("%d nacks counted by the metric, want %d", got, r.attempts)
		}
		wantFailures(t, p, "refused", r.attempts)
	})
}

func TestNackedEventsWaitForRoom(t *testing.T) {
	t.Parallel()
	o := newOutbox(t)
	q := testenv.ConsumeFrom(t, o.amqpURL, testenv.Binding{
		Exchange: exchange, Hold: true,
		Args: amqp.Table{"x-max-length": int64(5), "x-overflow": "reject-publish"},
	})
	p := o.start(t, quick...)
	o.insertMany(t, 20, 20, "order.created")
	o.waitRowCount(t, "attempts >= 3 AND last_error LIKE 'nacked%'", 15)
	if n := o.count(t, "dead_at IS NOT NULL"); n != 0 {
		t.Errorf("dead letters = %d, want none below DEAD_AFTER", n)
	}
	if n := outcomes(t, p, "nacked"); n < 45 {
		t.Errorf("nacked = %v, want at least 3 for each of 15", n)
	}
	ch := o.channel(t)
	testenv.Eventually(t, patience, "all are published as the queue is emptied", func() bool {
		if _, err := ch.QueuePurge(q.Name, false); err != nil {
			t.Fatal(err)
		}
		return o.count(t, "processed_at IS NULL") == 0
	})
}
