package test

import (
	"fmt"
	"testing"
	"time"

	"outbox-relay/internal/testenv"
)

// The link stalls: its sockets stay open and nothing moves. No confirm at all within CONFIRM_TIMEOUT is an
// outage, and no fault of any event.
func TestNoConfirmAtAllIsAnOutage(t *testing.T) {
	t.Parallel()
	for _, tt := range []struct {
		name    string
		stalled []testenv.Direction
	}{
		{"nothing moves", nil},
		{"the broker is heard no more", []testenv.Direction{testenv.ToClient}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			const n = 100
			o := newOutbox(t)
			link := testenv.NewProxy(t, o.amqpURL)
			q := testenv.Consume(t, o.amqpURL, exchange)
			p := o.start(t, "AMQP_URL="+link.URL, "CONFIRM_TIMEOUT=1s", "MAX_ATTEMPTS=1")
			p.Ready(t)
			o.insertNeighbours(t, 50)
			o.wantNeighbours(t, q, 1)

			link.Stall(tt.stalled...)
			stalled := time.Now()
			o.insertMany(t, n, n, "order.created")
			o.waitNotReady(t, p, []string{"rabbitmq: "})
			if took := time.Since(stalled); took > 10*time.Second { // 1 s, on a busy machine
				t.Errorf("the relay took %v to give the session up, want about CONFIRM_TIMEOUT", took)
			}
			wantReason(t, "log", p.Logs(), "the broker neither confirmed nor answered anything within CONFIRM_TIMEOUT")
			if got := outcomes(t, p, "unknown"); got != n {
				t.Errorf("%d unknown outcomes, want %d", got, n)
			}
			link.Resume()
			o.wantDelivered(t, q, "event_type = 'order.created'", 3) // that may go through at the end, and every attempt before
			o.wantNeighbours(t, q, 1)
			p.Ready(t)
			wantFailures(t, p, "order.created", 0)
			if got := outcomes(t, p, "late"); got != 0 {
				t.Errorf("%d late outcomes, want none", got)
			}
			if got := p.Metric(t, "outbox_reconnects_total", `server="rabbitmq"`); got < 1 {
				t.Errorf("outbox_reconnects_total = %v, want at least 1", got)
			}
		})
	}
}

// suspend has a queue's process take nothing in, as a queue without a majority would, or go on.
func suspend(t *testing.T, b *testenv.RabbitMQ, q *testenv.Queue, on bool) {
	t.Helper()
	call := "resume"
	if on {
		call = "suspend"
	}
	b.Ctl(t, "eval", fmt.Sprintf(
		`{ok, Q} = rabbit_amqqueue:lookup(rabbit_misc:r(<<"/">>, queue, <<"%s">>)), sys:%s(amqqueue:get_pid(Q)).`, q.Name, call))
}

// One queue of the broker confirms nothing while others do: its events are late, which counts no attempt
// and costs nobody else anything. The confirm that comes in the end still marks them.
func TestQueueThatConfirmsNothing(t *testing.T) {
	t.Parallel()
	broker := testenv.OwnRabbitMQ(t, testenv.Options{})
	for _, ordering := range []string{"aggregate", "none"} {
		t.Run(ordering, func(t *testing.T) {
			o := outboxOn(t, testenv.Database(t), broker.URL)
			name := "events-" + ordering // the vhost is shared
			q := testenv.Consume(t, broker.URL, name, neighbour, "order.created")
			stuck := testenv.Consume(t, broker.URL, name, "stuck")
			p := o.start(t, "ORDERING="+ordering, "AMQP_EXCHANGE="+name, "CONFIRM_TIMEOUT=1s", "RETRY_BASE=1m", "MAX_ATTEMPTS=1")
			p.Ready(t)
			o.insertNeighbours(t, 10)
			o.wantNeighbours(t, q, 1)

			suspend(t, broker, stuck, true)
			// With others in one transaction, and so in one claim: no confirm at all would be an outage.
			ids := o.neighbours(t, event{aggregate: "a", eventType: "stuck"}, event{aggregate: "b", eventType: "stuck"})
			for _, id := range ids {
				testenv.Eventually(t, patience, "the event is late", func() bool {
					o.insertNeighbours(t, 5) // others are confirmed all the while
					return o.row(t, id).wait
				})
				r := o.row(t, id)
				if r.attempts != 0 || r.processed || r.dead {
					t.Errorf("row = %+v, want it to wait without an attempt", r)
				}
				wantReason(t, "last_error", r.lastError, "late", "no confirm within 1s")
			}
			o.wantDelivered(t, q, "event_type <> 'stuck'", 1)
			if got := outcomes(t, p, "late"); got != len(ids) {
				t.Errorf("%d late outcomes, want %d", got, len(ids))
			}
			wantConnectionKept(t, p)
			p.Ready(t)

			suspend(t, broker, stuck, false)
			for _, id := range ids { // long before their retry
				if r := o.waitProcessed(t, id); r.attempts != 0 {
					t.Errorf("row = %+v, want no attempt", r)
				}
			}
			o.wantCopies(t, stuck, "event_type = 'stuck'", 1)
			wantFailures(t, p, "stuck", 0)
			wantConnectionKept(t, p)
		})
	}
}

// The same with nothing else to publish: the broker still answers, so it is the queue. The connection stays, and
// copies do not pile up, since each wait for the next is longer.
func TestLoneEventOfAQueueThatConfirmsNothing(t *testing.T) {
	t.Parallel()
	broker := testenv.OwnRabbitMQ(t, testenv.Options{})
	o := outboxOn(t, testenv.Database(t), broker.URL)
	q := testenv.Consume(t, broker.URL, exchange)
	p := o.start(t, "CONFIRM_TIMEOUT=500ms", "RETRY_BASE=500ms", "MAX_ATTEMPTS=1")
	p.Ready(t)
	suspend(t, broker, q, true)
	id := o.insert(t, event{})[0]
	testenv.Eventually(t, patience, "it was late three times", func() bool { return outcomes(t, p, "late") >= 3 })
	if r := o.row(t, id); r.attempts != 0 || r.dead {
		t.Errorf("row = %+v, want no attempt counted", r)
	}
	wait := testenv.Value[float64](t, o.dsn, "SELECT extract(epoch FROM retry_after - clock_timestamp()) FROM outbox_events")
	if wait < 0.5 { // 2 s, less a fifth, less what has passed
		t.Errorf("the next try is in %.1f s, want it to come later each time", wait)
	}
	wantConnectionKept(t, p)
	p.Ready(t)
	suspend(t, broker, q, false)
	o.waitProcessed(t, id)
	o.wantCopies(t, q, "true", 5)
	if got := outcomes(t, p, "unknown"); got != 0 {
		t.Errorf("%d unknown outcomes, want none", got)
	}
}
