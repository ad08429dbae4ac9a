package test

import (
	"fmt"
	"strings"
	"testing"

	amqp "github.com/rabbitmq/amqp091-go"

	"outbox-relay/internal/testenv"
)

// bothOrderings runs a test for each value of ORDERING.
func bothOrderings(t *testing.T, test func(t *testing.T, ordering string)) {
	t.Helper()
	for _, ordering := range []string{"aggregate", "none"} {
		t.Run(ordering, func(t *testing.T) {
			t.Parallel()
			test(t, "ORDERING="+ordering)
		})
	}
}

// outcomes is how often events had an outcome, by the relay's metrics.
func outcomes(t *testing.T, p *testenv.Process, name string) int {
	t.Helper()
	return int(p.Metric(t, "outbox_event_outcomes_total", `outcome="`+name+`"`))
}

// wantFailures fails the test unless the metrics count n attempts of events of that type, and no
// failure of another type.
func wantFailures(t *testing.T, p *testenv.Process, eventType string, n int) {
	t.Helper()
	const name = "outbox_events_failed_total"
	if got := p.Metric(t, name, `event_type="`+eventType+`"`); got != float64(n) {
		t.Errorf("%s of %s = %v, want %d", name, eventType, got, n)
	}
	if got := p.Metric(t, name); got != float64(n) {
		t.Errorf("%s = %v, want %d, all of them of %s", name, got, n, eventType)
	}
}

// wantConnectionKept fails the test if the relay has connected to the broker more than once.
func wantConnectionKept(t *testing.T, p *testenv.Process) {
	t.Helper()
	if n := p.Metric(t, "outbox_reconnects_total", `server="rabbitmq"`); n != 0 {
		t.Errorf("the connection to the broker was lost %v times", n)
	}
}

// insertNeighbours commits n events of aggregates of their own, for wantNeighbours.
func (o *outbox) insertNeighbours(t *testing.T, n int) {
	t.Helper()
	o.insertMany(t, n, n, neighbour)
}

const neighbour = "neighbour"

// wantNeighbours waits until all neighbours have reached q, and fails the test if one came more
// than maxCopies times, or if a failure was noted of any.
func (o *outbox) wantNeighbours(t *testing.T, q *testenv.Queue, maxCopies int) {
	t.Helper()
	o.wantDelivered(t, q, "event_type = '"+neighbour+"'", maxCopies)
}

// wantDelivered does the same for the events that where selects.
func (o *outbox) wantDelivered(t *testing.T, q *testenv.Queue, where string, maxCopies int) {
	t.Helper()
	o.wantCopies(t, q, where, maxCopies)
	for _, said := range testenv.Query[string](t, o.dsn,
		`SELECT format('%s: attempts %s, last_error %s', id, attempts, last_error) FROM outbox_events
		 WHERE (attempts <> 0 OR last_error IS NOT NULL OR dead_at IS NOT NULL) AND `+where+` LIMIT 3`) {
		t.Errorf("a failure was noted of event %s", said)
	}
}

// wantCopies waits until all events that where selects are marked and have reached q, and fails the
// test if one came more than maxCopies times.
func (o *outbox) wantCopies(t *testing.T, q *testenv.Queue, where string, maxCopies int) {
	t.Helper()
	o.waitRowCount(t, "processed_at IS NULL AND "+where, 0)
	ids := testenv.Query[string](t, o.dsn, "SELECT id FROM outbox_events WHERE "+where)
	q.WaitFor(t, patience, fmt.Sprintf("%d events with %s", len(ids), where), func(ds []amqp.Delivery) bool {
		copies, missing := deliveries(ds), 0
		for _, id := range ids {
			if copies[id] == 0 {
				missing++
			}
		}
		return missing == 0
	})
	copies := deliveries(q.Received())
	for _, id := range ids {
		if copies[id] > maxCopies {
			t.Errorf("event %s was delivered %d times, want at most %d", id, copies[id], maxCopies)
		}
	}
}

// wantDeadLetter fails the test unless the view of dead letters shows the event, with these parts of a reason.
func (o *outbox) wantDeadLetter(t *testing.T, id string, attempts int, parts ...string) {
	t.Helper()
	r := o.waitDead(t, id)
	if r.attempts != attempts || r.processed || r.wait {
		t.Errorf("row = %+v, want a dead letter after %d attempts that is not to be retried", r, attempts)
	}
	wantReason(t, "last_error", r.lastError, parts...)
	if shown := testenv.Query[string](t, o.dsn, `SELECT last_error FROM outbox_dead_letters WHERE id = $1`, id); len(shown) != 1 || shown[0] != r.lastError {
		t.Errorf("outbox_dead_letters has %q of event %s, want its last_error %q", shown, id, r.lastError)
	}
}

// waitDeadLetters waits until the gauge, which is counted every few seconds, shows n dead letters.
func waitDeadLetters(t *testing.T, p *testenv.Process, n int) {
	t.Helper()
	testenv.Eventually(t, patience, fmt.Sprintf("outbox_dead_letters = %d", n), func() bool {
		return p.Metric(t, "outbox_dead_letters") == float64(n)
	})
}

// wantAbsent fails the test if a message of the event has reached q.
func wantAbsent(t *testing.T, q *testenv.Queue, id string) {
	t.Helper()
	if n := deliveries(q.Received())[id]; n != 0 {
		t.Errorf("event %s was delivered %d times, want never", id, n)
	}
}

// bind adds a binding of q to the relay's exchange.
func (o *outbox) bind(t *testing.T, q *testenv.Queue, key string) {
	t.Helper()
	if err := o.channel(t).QueueBind(q.Name, key, exchange, false, nil); err != nil {
		t.Fatal(err)
	}
}

var quick = []string{"RETRY_BASE=200ms", "RETRY_MAX=1s", "MAX_ATTEMPTS=3"}

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

func wantOnce(t *testing.T, q *testenv.Queue) {
	t.Helper()
	for id, n := range deliveries(q.Received()) {
		if n != 1 {
			t.Errorf("event %s came %d times, want once", id, n)
		}
	}
}

func (o *outbox) wantUntouched(t *testing.T) {
	t.Helper()
	if n := o.count(t, "attempts <> 0 OR last_error IS NOT NULL OR dead_at IS NOT NULL"); n != 0 {
		t.Errorf("%d events bear a trace of the outage, want none", n)
	}
}

func urlUser(t *testing.T, url string) string {
	t.Helper()
	_, rest, _ := strings.Cut(url, "://")
	user, _, ok := strings.Cut(rest, "@")
	if !ok {
		t.Fatalf("no user in %s", url)
	}
	return user
}
