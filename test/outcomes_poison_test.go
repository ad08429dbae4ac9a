package test

import (
	"fmt"
	"testing"
	"time"

	amqp "github.com/rabbitmq/amqp091-go"

	"outbox-relay/internal/testenv"
)

// Twice a batch of events that fail again and again, before a thousand good ones.
func TestPoisonDelaysNoOther(t *testing.T) {
	t.Parallel()
	const batch, good = 100, 1000
	for _, tt := range []struct {
		name, headers, outcome string
	}{
		{"returned", `{"exchange": "there"}`, "returned"},
		{"closing the channel", `{"exchange": "missing"}`, "rejected"},
	} {
		for _, ordering := range []string{"aggregate", "none"} {
			t.Run(tt.name+", ordering "+ordering, func(t *testing.T) {
				t.Parallel()
				o := newOutbox(t)
				q := testenv.Consume(t, o.amqpURL, "there", neighbour)
				_, err := o.db.ExecContext(t.Context(),
					`INSERT INTO outbox_events (aggregate_type, aggregate_id, event_type, payload, headers)
					 SELECT 'order', 'poison' || i, 'poison', '{}', $2::jsonb FROM generate_series(1, $1::int) i`, 2*batch, tt.headers)
				if err != nil {
					t.Fatal(err)
				}
				p := o.start(t, "ORDERING="+ordering, "AMQP_EXCHANGE={header.exchange}", "BATCH_SIZE="+itoa(batch),
					"RETRY_BASE=500ms", "RETRY_MAX=2s", "MAX_ATTEMPTS=1000000")
				o.waitRowCount(t, "attempts > 0", 2*batch)

				inserted := time.Now()
				o.routedTo(t, good, "there")
				q.WaitFor(t, patience, fmt.Sprintf("%d good events", good), func(ds []amqp.Delivery) bool { return len(deliveries(ds)) >= good })
				took := time.Since(inserted)
				t.Logf("%d good events delivered in %v", good, took)
				if took > 15*time.Second { // a couple of seconds, on a busy machine
					t.Errorf("%d good events took %v behind %d that fail", good, took, 2*batch)
				}
				o.wantNeighbours(t, q, 1)
				if n := o.count(t, "event_type = 'poison' AND (processed_at IS NOT NULL OR dead_at IS NOT NULL OR retry_after IS NULL)"); n != 0 {
					t.Errorf("%d of the failing events are not to be retried any more", n)
				}
				before := outcomes(t, p, tt.outcome)
				testenv.Eventually(t, patience, "they are still retried", func() bool { return outcomes(t, p, tt.outcome) > before+batch })
				wantConnectionKept(t, p)
			})
		}
	}
}

// Many that close the channel, in the midst of good events: each closing puts its neighbours under suspicion.
func TestManyEventsThatCloseTheChannelAreFound(t *testing.T) {
	t.Parallel()
	const n, guilty = 500, 20
	bothOrderings(t, func(t *testing.T, ordering string) {
		o := newOutbox(t)
		q := testenv.Consume(t, o.amqpURL, "there")
		_, err := o.db.ExecContext(t.Context(),
			`INSERT INTO outbox_events (aggregate_type, aggregate_id, event_type, payload, headers)
			 SELECT 'order', i, CASE WHEN i % $2 = 0 THEN 'guilty' ELSE $3 END, '{}',
			        jsonb_build_object('exchange', CASE WHEN i % $2 = 0 THEN 'missing' ELSE 'there' END)
			 FROM generate_series(1, $1::int) i`, n, n/guilty, neighbour)
		if err != nil {
			t.Fatal(err)
		}
		p := o.start(t, ordering, "AMQP_EXCHANGE={header.exchange}", "RETRY_BASE=200ms", "MAX_ATTEMPTS=2")
		o.wantNeighbours(t, q, 3)
		o.waitRowCount(t, "dead_at IS NOT NULL AND attempts = 2 AND last_error LIKE 'rejected: the broker closed the channel: 404 %'", guilty)
		wantFailures(t, p, "guilty", 2*guilty)
		wantConnectionKept(t, p)
	})
}
