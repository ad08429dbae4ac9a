package test

import (
	"fmt"
	"strings"
	"testing"
	"time"

	amqp "github.com/rabbitmq/amqp091-go"

	"outbox-relay/internal/testenv"
)

// quick makes retries come soon.
var quick = []string{"RETRY_BASE=200ms", "RETRY_MAX=1s", "MAX_ATTEMPTS=3"}

// outcome is a relay's count of one outcome.
func outcome(t *testing.T, p *testenv.Process, name string) float64 {
	t.Helper()
	return p.Metric(t, "outbox_event_outcomes_total", `outcome="`+name+`"`)
}

// neighbours inserts a hundred good events of as many aggregates, with others in their midst, in
// one transaction, and returns the ids of the others.
func (o *outbox) neighbours(t *testing.T, others ...event) []string {
	t.Helper()
	var events []event
	for i := range 50 {
		events = append(events, event{aggregate: fmt.Sprint("before", i)})
	}
	events = append(events, others...)
	for i := range 50 {
		events = append(events, event{aggregate: fmt.Sprint("after", i)})
	}
	return o.insert(t, events...)[50 : 50+len(others)]
}

// wantOnce fails the test unless each message came once.
func wantOnce(t *testing.T, q *testenv.Queue) {
	t.Helper()
	for id, n := range deliveries(q.Received()) {
		if n != 1 {
			t.Errorf("event %s came %d times, want once", id, n)
		}
	}
}

func TestReturnedEventIsRetriedUntilItHasAQueue(t *testing.T) {
	t.Parallel()
	o := newOutbox(t)
	q := testenv.Consume(t, o.amqpURL, exchange, "order.created")
	p := o.start(t, "RETRY_BASE=200ms", "RETRY_MAX=500ms", "MAX_ATTEMPTS=1000")
	p.Ready(t)
	lost := o.neighbours(t, event{aggregate: "lost", eventType: "nobody.listens"})
	r := o.waitRow(t, lost[0], "has failed", func(r row) bool { return r.attempts > 0 })
	wantReason(t, "last_error", r.lastError, "returned", "312", "NO_ROUTE", "nobody.listens")
	waitCount(t, q, 100)
	if n := outcome(t, p, "returned"); n < 1 {
		t.Errorf("returned = %v, want at least 1", n)
	}
	late := testenv.Consume(t, o.amqpURL, exchange, "nobody.listens")
	d := late.Next(t, patience)
	o.waitProcessed(t, lost[0])
	if n, ok := d.Headers["attempt"].(int64); !ok || n < 2 {
		t.Errorf("header attempt = %v, want over 1", d.Headers["attempt"])
	}
	wantOnce(t, q)
}

func TestEventOutOfAttemptsBecomesADeadLetter(t *testing.T) {
	t.Parallel()
	o := newOutbox(t)
	p := o.start(t, quick...)
	id := o.insert(t, event{eventType: "nobody.listens"})[0]
	r := o.waitDead(t, id)
	if r.attempts != 3 || r.processed || r.wait {
		t.Errorf("row = %+v, want three attempts and nothing more to come", r)
	}
	if n := testenv.Value[int](t, o.dsn, "SELECT count(*) FROM outbox_dead_letters"); n != 1 {
		t.Errorf("outbox_dead_letters holds %d rows, want 1", n)
	}
	testenv.Eventually(t, patience, "the gauge shows the dead letter", func() bool { return p.Metric(t, "outbox_dead_letters") == 1 })
	if n := p.Metric(t, "outbox_events_failed_total", `event_type="nobody.listens"`); n != 3 {
		t.Errorf("failed = %v, want 3", n)
	}
}

// A full queue is a condition that passes: it counts attempts, but young events do not die of it.
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
	if n := outcome(t, p, "nacked"); n < 45 {
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

// The broker closes the channel and does not say because of which message.
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
	if n := outcome(t, p, "rejected"); n != 5 {
		t.Errorf("rejected = %v, want 5", n)
	}
}

// wantUntouched fails the test if an outage left a trace on any event.
func (o *outbox) wantUntouched(t *testing.T) {
	t.Helper()
	if n := o.count(t, "attempts <> 0 OR last_error IS NOT NULL OR dead_at IS NOT NULL"); n != 0 {
		t.Errorf("%d events bear a trace of the outage, want none", n)
	}
}

func TestMissingExchangeOfAllEventsIsAnOutage(t *testing.T) {
	t.Parallel()
	o := newOutbox(t)
	p := o.start(t, "AMQP_DECLARE=false", "AMQP_EXCHANGE=events", "RETRY_BASE=200ms")
	o.insertMany(t, 10, 10, "order.created")
	p.WaitLog(t, patience, "NOT_FOUND - no exchange 'events'")
	testenv.Eventually(t, patience, "/readyz gives the reason", func() bool {
		status, body := p.Get(t, "/readyz")
		return status == 503 && strings.Contains(body, "no exchange 'events'")
	})
	o.wantUntouched(t)
	q := testenv.Consume(t, o.amqpURL, "events") // declares it
	waitCount(t, q, 10)
	p.Ready(t)
	// Deleted while the relay publishes: found out by the next event, and no fault of that one.
	if err := o.channel(t).ExchangeDelete("events", false, false); err != nil {
		t.Fatal(err)
	}
	o.insertMany(t, 10, 10, "order.paid")
	p.NotReady(t)
	o.wantUntouched(t)
	again := testenv.Consume(t, o.amqpURL, "events") // declares it, and only then binds: one may be returned
	waitCount(t, again, 10)
	o.waitRowCount(t, "processed_at IS NOT NULL", 20)
}

func TestMissingPermissionAndRefusedLoginAreOutages(t *testing.T) {
	b := testenv.OwnRabbitMQ(t, testenv.Options{})
	o := outboxOn(t, testenv.Database(t), b.URL)
	b.Ctl(t, "add_user", "sender", "first")
	b.Ctl(t, "set_permissions", "sender", ".*", "^$", "")
	q := testenv.Consume(t, b.URL, exchange)
	p := testenv.Start(t, "DATABASE_URL="+o.dsn, "AMQP_URL="+strings.Replace(b.URL, urlUser(t, b.URL), "sender:first", 1))
	p.Ready(t)
	o.insertMany(t, 10, 10, "order.created")
	p.WaitLog(t, patience, "ACCESS_REFUSED")
	p.NotReady(t)
	o.wantUntouched(t)
	b.Ctl(t, "set_permissions", "sender", ".*", ".*", "")
	waitCount(t, q, 10)

	b.Ctl(t, "change_password", "sender", "second")
	b.Ctl(t, "close_all_user_connections", "sender", "test")
	o.insertMany(t, 10, 10, "order.paid")
	p.WaitLog(t, patience, "403")
	p.NotReady(t)
	o.wantUntouched(t)
	b.Ctl(t, "change_password", "sender", "first")
	waitCount(t, q, 20)

	b.Ctl(t, "set_user_limits", "sender", `{"max-connections": 0}`)
	b.Ctl(t, "close_all_user_connections", "sender", "test")
	o.insertMany(t, 10, 10, "order.sent")
	p.WaitLog(t, patience, "530")
	b.Ctl(t, "set_user_limits", "sender", `{"max-connections": -1}`)
	waitCount(t, q, 30)
	o.waitRowCount(t, "processed_at IS NOT NULL AND attempts = 0 AND last_error IS NULL", 30)
	if strings.Contains(p.Logs(), "first") {
		t.Error("the log holds the password")
	}
}

// urlUser is the part of a URL that says who connects.
func urlUser(t *testing.T, url string) string {
	t.Helper()
	_, rest, _ := strings.Cut(url, "://")
	user, _, ok := strings.Cut(rest, "@")
	if !ok {
		t.Fatalf("no user in %s", url)
	}
	return user
}

func TestPoisonDelaysNobody(t *testing.T) {
	t.Parallel()
	o := newOutbox(t)
	q := testenv.Consume(t, o.amqpURL, exchange, "order.created")
	p := o.start(t, "BATCH_SIZE=100", "RETRY_BASE=500ms", "RETRY_MAX=2s")
	p.Ready(t)
	o.insertMany(t, 200, 200, "nobody.listens")
	inserted := time.Now()
	o.insertMany(t, 1000, 100, "order.created")
	waitCount(t, q, 1000)
	if took := time.Since(inserted); took > 15*time.Second {
		t.Errorf("good events took %v behind twice a batch of failing ones", took)
	}
	wantOnce(t, q)
	o.waitRowCount(t, "event_type = 'nobody.listens' AND attempts > 0 AND processed_at IS NULL", 200)
}
