package test

import (
	"fmt"
	"strings"
	"syscall"
	"testing"
	"time"

	"outbox-relay/internal/testenv"
)

// alarmed is an outbox with an exchange of its own on a broker that a test may starve.
type alarmed struct {
	*outbox
	broker   *testenv.RabbitMQ
	exchange string
	queue    *testenv.Queue
}

// alarm has the broker refuse to read from publishers, until it is called off.
func (a *alarmed) alarm(t *testing.T, on bool) {
	t.Helper()
	watermark := "0.6"
	if on {
		watermark = "0.0000001"
	}
	a.broker.Ctl(t, "set_vm_memory_high_watermark", watermark)
}

// start runs a relay whose confirm clock would run out during the alarm if it did not stand still.
func (a *alarmed) start(t *testing.T, env ...string) *testenv.Process {
	t.Helper()
	return a.outbox.start(t, append(env, "AMQP_EXCHANGE="+a.exchange, "CONFIRM_TIMEOUT=1s")...)
}

// waitBlocked waits until the relay knows of the alarm. The broker tells it at its first publish.
func (a *alarmed) waitBlocked(t *testing.T, p *testenv.Process) {
	t.Helper()
	testenv.Eventually(t, patience, "the relay is blocked", func() bool { return p.Metric(t, "outbox_broker_blocked") == 1 })
	wantReason(t, "readiness", p.NotReady(t), "blocked by the broker")
}

// wantNoTransaction looks for a while whether the relay keeps a transaction open: it would hold
// vacuum back for as long as the alarm lasts.
func (a *alarmed) wantNoTransaction(t *testing.T, d time.Duration) {
	t.Helper()
	for until := time.Now().Add(d); time.Now().Before(until); time.Sleep(100 * time.Millisecond) {
		for _, open := range testenv.Query[string](t, a.dsn,
			`SELECT format('%s, since %s, last query %s', state, clock_timestamp() - xact_start, query) FROM pg_stat_activity
			 WHERE datname = current_database() AND application_name LIKE 'outbox-relay%'
			   AND xact_start < clock_timestamp() - interval '1 second'`) {
			t.Fatalf("a transaction of the relay is open during the alarm: %s", open)
		}
	}
}

// insertLarge commits n events of 1 MiB at once: a batch of them is more than the sockets between relay
// and broker hold.
func (a *alarmed) insertLarge(t *testing.T, n int) {
	t.Helper()
	var events []event
	for i := range n {
		events = append(events, event{aggregate: itoa(i), payload: `"` + strings.Repeat("x", 1<<20) + `"`})
	}
	a.insert(t, events...)
}

// wantSettled waits until all is delivered and fails the test if the alarm cost a copy, an
// attempt, or the connection.
func (a *alarmed) wantSettled(t *testing.T, p *testenv.Process, n int) {
	t.Helper()
	a.wantCopies(t, a.queue, "true", 1)
	a.wantUncounted(t)
	p.Ready(t)
	if got := p.Metric(t, "outbox_broker_blocked"); got != 0 {
		t.Errorf("outbox_broker_blocked = %v after the alarm, want 0", got)
	}
	if got := outcomes(t, p, "confirmed"); got != n {
		t.Errorf("%d confirmed, want %d", got, n)
	}
	if got := outcomes(t, p, "unknown") + outcomes(t, p, "late"); got != 0 {
		t.Errorf("%d unknown or late outcomes, want none: the connection was kept and the clock stood still", got)
	}
	wantFailures(t, p, "order.created", 0)
	wantConnectionKept(t, p)
}

// wantUncounted fails the test if an attempt was counted. An unordered relay gives its row locks up
// during the alarm and keeps the events to itself by retry_after.
func (a *alarmed) wantUncounted(t *testing.T) {
	t.Helper()
	for _, said := range testenv.Query[string](t, a.dsn,
		`SELECT format('%s: attempts %s, last_error %s', id, attempts, last_error) FROM outbox_events
		 WHERE attempts <> 0 OR dead_at IS NOT NULL OR last_error IS NOT NULL LIMIT 3`) {
		t.Errorf("the alarm was counted against event %s", said)
	}
}

// A memory or disk alarm: the broker reads no more from connections that publish. What follows is
// one after the other, since an alarm is the whole broker's.
func TestBrokerUnderAlarm(t *testing.T) {
	t.Parallel()
	broker := testenv.OwnRabbitMQ(t, testenv.Options{})
	for i, tt := range []struct {
		name string
		test func(t *testing.T, a *alarmed)
	}{
		{"events inserted meanwhile, ordered", func(t *testing.T, a *alarmed) { a.testInserted(t, "ORDERING=aggregate") }},
		{"events inserted meanwhile, unordered", func(t *testing.T, a *alarmed) { a.testInserted(t, "ORDERING=none") }},
		{"in the middle of a write, ordered", func(t *testing.T, a *alarmed) { a.testWriting(t, "ORDERING=aggregate") }},
		{"in the middle of a write, unordered", func(t *testing.T, a *alarmed) { a.testWriting(t, "ORDERING=none") }},
		{"shutdown", func(t *testing.T, a *alarmed) { a.testShutdown(t, "ORDERING=aggregate") }},
	} {
		t.Run(tt.name, func(t *testing.T) {
			a := &alarmed{outbox: outboxOn(t, testenv.Database(t), broker.URL), broker: broker, exchange: fmt.Sprintf("events%d", i)}
			a.queue = testenv.Consume(t, broker.URL, a.exchange)
			t.Cleanup(func() { a.alarm(t, false) })
			tt.test(t, a)
		})
	}
}

func (a *alarmed) testInserted(t *testing.T, ordering string) {
	p := a.start(t, ordering, "BATCH_SIZE=50")
	p.Ready(t)
	a.alarm(t, true)
	a.insertMany(t, 100, 20, "order.created")
	a.waitBlocked(t, p)
	a.insertMany(t, 100, 20, "order.created")
	a.wantNoTransaction(t, 2*time.Second)
	a.alarm(t, false)
	a.wantSettled(t, p, 200)
	if ordering == "ORDERING=aggregate" {
		a.verify(t, a.queue, nil, 0)
	}
}

func (a *alarmed) testWriting(t *testing.T, ordering string) {
	const n = 40
	p := a.start(t, ordering)
	p.Ready(t)
	a.alarm(t, true)
	a.insertLarge(t, n)
	a.waitBlocked(t, p)
	a.wantNoTransaction(t, 2*time.Second)
	a.alarm(t, false)
	a.wantSettled(t, p, n)
}

// What is in the socket when the relay ends may still reach the broker after the alarm. So there
// may be copies, of no more than was in flight.
func (a *alarmed) testShutdown(t *testing.T, ordering string) {
	const n, shutdown = 40, 3 * time.Second
	p := a.start(t, ordering, "SHUTDOWN_TIMEOUT="+shutdown.String())
	p.Ready(t)
	a.alarm(t, true)
	a.insertLarge(t, n)
	a.waitBlocked(t, p)
	inFlight := int(p.Metric(t, "outbox_in_flight_events"))
	if inFlight < 2 {
		t.Errorf("%d events are in flight, want so many that a write is under way", inFlight)
	}
	asked := time.Now()
	p.Signal(t, syscall.SIGTERM)
	code := p.Wait(t, patience)
	if took := time.Since(asked); took > shutdown+time.Second { // a second for a busy machine
		t.Errorf("the relay took %v to end, want SHUTDOWN_TIMEOUT, %v, at most", took, shutdown)
	}
	t.Logf("exit code %d with %d in flight", code, inFlight)
	a.wantNoTransaction(t, time.Second)
	next := a.start(t, ordering)
	a.alarm(t, false)
	a.wantCopies(t, a.queue, "true", 2)
	a.wantUncounted(t)
	next.Ready(t)
	copies := 0
	for _, n := range deliveries(a.queue.Received()) {
		copies += n - 1
	}
	if copies > inFlight {
		t.Errorf("%d copies, want no more than were in flight, %d", copies, inFlight)
	}
}
