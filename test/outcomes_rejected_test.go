package test

import (
	"fmt"
	"strings"
	"testing"

	"outbox-relay/internal/testenv"
)

// routedTo makes neighbours whose exchange is given by a header.
func (o *outbox) routedTo(t *testing.T, n int, exchange string) {
	t.Helper()
	_, err := o.db.ExecContext(t.Context(),
		`INSERT INTO outbox_events (aggregate_type, aggregate_id, event_type, payload, headers)
		 SELECT 'order', i, $2, '{}', jsonb_build_object('exchange', $3::text) FROM generate_series(1, $1::int) i`,
		n, neighbour, exchange)
	if err != nil {
		t.Fatal(err)
	}
}

// The broker closes the channel because of one message and does not say of which. The others that
// were in flight are sent once more at most, and later attempts of the guilty one disturb nobody.
func TestEventThatClosesTheChannelDisturbsNoOther(t *testing.T) {
	t.Parallel()
	bothOrderings(t, func(t *testing.T, ordering string) {
		const maxAttempts = 4
		o := newOutbox(t)
		q := testenv.Consume(t, o.amqpURL, "there")
		o.routedTo(t, 50, "there")
		id := o.insert(t, event{aggregate: "guilty", eventType: "guilty", headers: `{"exchange": "missing"}`})[0]
		o.routedTo(t, 50, "there")
		p := o.start(t, ordering, "AMQP_EXCHANGE={header.exchange}", "RETRY_BASE=300ms", "MAX_ATTEMPTS="+itoa(maxAttempts))

		o.waitRow(t, id, "has failed", func(r row) bool { return r.attempts >= 1 })
		o.wantNeighbours(t, q, 2)
		testenv.Exec(t, o.dsn, `UPDATE outbox_events SET event_type = 'early' WHERE event_type = $1`, neighbour)
		for !o.row(t, id).dead { // more of them around each retry
			o.routedTo(t, 20, "there")
		}
		o.wantDeadLetter(t, id, maxAttempts, "rejected", "the broker closed the channel: 404 NOT_FOUND", "no exchange 'missing'")
		o.wantNeighbours(t, q, 1)
		wantAbsent(t, q, id)
		if n := outcomes(t, p, "rejected"); n != maxAttempts {
			t.Errorf("%d rejections counted by the metric, want %d", n, maxAttempts)
		}
		if n := outcomes(t, p, "unknown"); n != 0 {
			t.Errorf("%d unknown outcomes, want none: the relay itself finds the guilty event", n)
		}
		wantFailures(t, p, "guilty", maxAttempts)
		wantConnectionKept(t, p)
	})
}

// 16 MiB is what RabbitMQ 4 takes unless told otherwise; the relay believes what it is told.
func TestEventOverTheBrokersLimitIsFoundAmongItsNeighbours(t *testing.T) {
	t.Parallel()
	const maxAttempts = 2
	o := newOutbox(t)
	q := testenv.Consume(t, o.amqpURL, exchange)
	o.insertNeighbours(t, 50)
	id := o.insert(t, event{aggregate: "guilty", eventType: "guilty", payload: `"` + strings.Repeat("x", 17<<20) + `"`})[0]
	o.insertNeighbours(t, 50)
	p := o.start(t, "AMQP_MAX_MESSAGE_BYTES=33554432", "BATCH_BYTES=33554432", "RETRY_BASE=300ms", "MAX_ATTEMPTS="+itoa(maxAttempts))

	o.wantDeadLetter(t, id, maxAttempts, "rejected", "the broker closed the channel: 406 PRECONDITION_FAILED", "16777216")
	o.wantNeighbours(t, q, 2)
	wantAbsent(t, q, id)
	if n := outcomes(t, p, "rejected"); n != maxAttempts {
		t.Errorf("%d rejections counted by the metric, want %d", n, maxAttempts)
	}
	wantFailures(t, p, "guilty", maxAttempts)
	wantConnectionKept(t, p)
}

// What can never be sent is found out before the wire, where it would cost the neighbours their
// channel or even the connection.
func TestUnsendableEventIsADeadLetterAtOnce(t *testing.T) {
	t.Parallel()
	bothOrderings(t, func(t *testing.T, ordering string) {
		bad := []struct {
			event  event
			reason []string
		}{
			{event{headers: `["a", "list"]`}, []string{"headers are not a JSON object"}},
			{event{headers: `{"message-id": "mine"}`}, []string{`"message-id"`, "reserved"}},
			{event{headers: `{"expiration": "soon"}`}, []string{`"expiration"`, "is not an integer"}},
			{event{headers: `{"expiration": -1}`}, []string{`"expiration"`, "is not an integer"}},
			{event{headers: `{"priority": 256}`}, []string{`"priority"`, "is not an integer from 0 to 255"}},
			{event{headers: `{"CC": "a"}`}, []string{`"CC"`, "is not a list of strings"}},
			{event{headers: `{"n": 1e400}`}, []string{`"n"`}},
			{event{headers: `{"` + strings.Repeat("k", 256) + `": 1}`}, []string{"256 bytes", "over the limit of 255"}},
			{event{headers: `{"k": "` + strings.Repeat("v", 130_000) + `"}`}, []string{"headers and properties", "over the limit of 128000"}},
			{event{headers: `{"correlation-id": "` + strings.Repeat("c", 256) + `"}`}, []string{"correlation-id is 256 bytes"}},
			// The column counts letters, the protocol bytes.
			{event{aggregate: strings.Repeat("𝄞", 100)}, []string{"routing key", "over the limit of 255"}},
			{event{payload: `"` + strings.Repeat("x", 200_000) + `"`}, []string{"payload is 200002 bytes, over the limit of 150000"}},
		}
		o := newOutbox(t)
		q := testenv.Consume(t, o.amqpURL, exchange)
		p := o.start(t, ordering, "AMQP_MAX_MESSAGE_BYTES=150000", "AMQP_ROUTING_KEY={event_type}.{aggregate_id}")
		p.Ready(t)
		o.insertNeighbours(t, 50)
		var events []event
		for i, b := range bad {
			e := b.event
			e.eventType = "bad"
			if e.aggregate == "" {
				e.aggregate = "bad-" + itoa(i)
			}
			events = append(events, e)
		}
		ids := o.insert(t, events...)
		o.insertNeighbours(t, 50)

		for i, id := range ids {
			o.wantDeadLetter(t, id, 1, append(bad[i].reason, "rejected")...)
			wantAbsent(t, q, id)
		}
		o.wantNeighbours(t, q, 1)
		if n := outcomes(t, p, "rejected"); n != len(bad) {
			t.Errorf("%d rejections counted by the metric, want %d", n, len(bad))
		}
		wantFailures(t, p, "bad", len(bad))
		wantConnectionKept(t, p)
		if strings.Contains(p.Logs(), strings.Repeat("v", 50)) {
			t.Error("a header's value is in the log")
		}
	})
}

func TestEventThatClosesTheChannelIsFoundAmongItsNeighbours(t *testing.T) {
	t.Parallel()
	o := newOutbox(t)
	q := testenv.Consume(t, o.amqpURL, exchange)
	p := o.start(t, append(quick, "AMQP_EXCHANGE={header.exchange}")...)
	good := func(n string) event { return event{aggregate: n, headers: `{"exchange": "outbox"}`} }
	var events []event
	for i := range 50 {
		events = append(events, good(fmt.Sprint("before", i)))
	}
	events = append(events, event{aggregate: "guilty", headers: `{"exchange": "missing"}`})
	for i := range 50 {
		events = append(events, good(fmt.Sprint("after", i)))
	}
	guilty := o.insert(t, events...)[50]
	r := o.waitDead(t, guilty)
	wantReason(t, "last_error", r.lastError, "the broker closed the channel", "404", "missing")
	if r.attempts != 3 {
		t.Errorf("attempts = %d, want 3", r.attempts)
	}
	o.waitRowCount(t, "processed_at IS NOT NULL AND attempts = 0 AND last_error IS NULL", 100)
	waitCount(t, q, 100)
	for id, n := range deliveries(q.Received()) {
		if n > 2 {
			t.Errorf("neighbour %s came %d times, want two at most", id, n)
		}
	}
	if n := p.Metric(t, "outbox_reconnects_total", `server="rabbitmq"`); n != 0 {
		t.Errorf("reconnects = %v, want none: the connection was well", n)
	}
}

func TestEventThatCannotBeSentIsADeadLetterAtOnce(t *testing.T) {
	t.Parallel()
	o := newOutbox(t)
	q := testenv.Consume(t, o.amqpURL, exchange)
	p := o.start(t, "AMQP_ROUTING_KEY={aggregate_id}", "AMQP_MAX_MESSAGE_BYTES=100000")
	bad := []struct {
		event  event
		reason string
	}{
		{event{aggregate: "a", headers: `[1]`}, "object"},
		{event{aggregate: "b", headers: `{"attempt": 7}`}, "attempt"},
		{event{aggregate: strings.Repeat("𝄞", 100)}, "255"},
		{event{aggregate: "c", payload: `{"x": "` + strings.Repeat("x", 100_000) + `"}`}, "100000"},
		{event{aggregate: "d", headers: `{"expiration": "soon"}`}, "expiration"},
	}
	var events []event
	for _, b := range bad {
		events = append(events, b.event)
	}
	for i, id := range o.neighbours(t, events...) {
		r := o.waitDead(t, id)
		wantReason(t, "last_error", r.lastError, "rejected", bad[i].reason)
		if r.attempts != 1 {
			t.Errorf("attempts of event %d = %d, want 1", i, r.attempts)
		}
	}
	waitCount(t, q, 100)
	wantOnce(t, q)
	if n := p.Metric(t, "outbox_reconnects_total", `server="rabbitmq"`); n != 0 {
		t.Errorf("reconnects = %v, want none: nothing of it may reach the broker", n)
	}
	if n := outcomes(t, p, "rejected"); n != 5 {
		t.Errorf("rejected = %v, want 5", n)
	}
}
