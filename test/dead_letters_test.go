package test

import (
	"encoding/json"
	"fmt"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	amqp "github.com/rabbitmq/amqp091-go"

	"outbox-relay/internal/testenv"
)

// operate runs a command as a person does.
func (o *outbox) operate(t *testing.T, args ...string) (code int, stdout, stderr string) {
	t.Helper()
	return testenv.Command(t, []string{"DATABASE_URL=" + o.dsn, "AMQP_URL=" + o.amqpURL}, args...)
}

// mustOperate is operate for what must succeed.
func (o *outbox) mustOperate(t *testing.T, args ...string) (stdout, stderr string) {
	t.Helper()
	code, stdout, stderr := o.operate(t, args...)
	if code != 0 {
		t.Fatalf("outbox-relay %s: exit code %d\n%s%s", strings.Join(args, " "), code, stdout, stderr)
	}
	return stdout, stderr
}

// insertDead inserts events that are dead letters since so many minutes, as a relay would leave them.
func (o *outbox) insertDead(t *testing.T, minutes int, lastError string, events ...event) []string {
	t.Helper()
	ids := o.insert(t, events...)
	for _, id := range ids {
		testenv.Exec(t, o.dsn, `UPDATE outbox_events SET attempts = 10, dead_at = now() - $2 * interval '1 minute', last_error = $3 WHERE id = $1`,
			id, minutes, lastError)
	}
	return ids
}

// manyDead inserts n dead letters of that many aggregates.
func (o *outbox) manyDead(t *testing.T, n, aggregates int, eventType string) {
	t.Helper()
	o.insertMany(t, n, aggregates, eventType)
	testenv.Exec(t, o.dsn, `UPDATE outbox_events SET attempts = 10, dead_at = now(), last_error = 'returned' WHERE event_type = $1`, eventType)
}

// fingerprint changes with any column of any event.
func (o *outbox) fingerprint(t *testing.T) string {
	t.Helper()
	return testenv.Value[string](t, o.dsn, `SELECT coalesce(md5(string_agg(e::text, ';' ORDER BY id)), '') FROM outbox_events e`)
}

// auditLine is the last line of the log with that message.
func auditLine(t *testing.T, stderr, msg string) (found map[string]any) {
	t.Helper()
	for line := range strings.Lines(stderr) {
		var fields map[string]any
		if json.Unmarshal([]byte(line), &fields) == nil && fields["msg"] == msg {
			found = fields
		}
	}
	if found == nil {
		t.Fatalf("no line %q in the log:\n%s", msg, stderr)
	}
	return found
}

// holds is whether the event has come.
func holds(id string) func([]amqp.Delivery) bool {
	return func(ds []amqp.Delivery) bool {
		return slices.ContainsFunc(ds, func(d amqp.Delivery) bool { return d.MessageId == id })
	}
}

func TestDeadLettersAreListedByFilter(t *testing.T) {
	t.Parallel()
	o := newOutbox(t)
	old := o.insertDead(t, 180, "returned: no QUEUE for order.paid", event{aggregate: "1", eventType: "order.paid", payload: `{"secret": 7}`})[0]
	young := o.insertDead(t, 5, "nacked: the broker refused it", event{aggregate: "2"})[0]
	third := o.insertDead(t, 1, "rejected\x1b[2J", event{aggregate: "1"})[0]
	o.insert(t, event{aggregate: "alive"})
	for _, tc := range []struct {
		args []string
		want []string // the latest first
	}{
		{nil, []string{third, young, old}},
		{[]string{"--limit=2"}, []string{third, young}},
		{[]string{"--limit=0"}, []string{third, young, old}},
		{[]string{old, young}, []string{young, old}},
		{[]string{strings.ToUpper(old)}, []string{old}},
		{[]string{"--event-type=order.paid"}, []string{old}},
		{[]string{"--aggregate-type=order", "--aggregate-id=1"}, []string{third, old}},
		{[]string{"--aggregate-type=cart"}, nil},
		{[]string{"--error=no queue"}, []string{old}},
		{[]string{"--error=%"}, nil},
		{[]string{"--since=2h"}, []string{third, young}},
		{[]string{"--until=2h"}, []string{old}},
		{[]string{"--since=4h", "--until=3m"}, []string{young, old}},
		{[]string{"--since=2020-01-01T00:00:00Z", "--until=" + time.Now().Add(-time.Hour).Format(time.RFC3339)}, []string{old}},
	} {
		lines, _ := o.mustOperate(t, append([]string{"dead-letters", "list", "--json"}, tc.args...)...)
		var got []string
		for line := range strings.Lines(lines) {
			var d struct{ ID string }
			if err := json.Unmarshal([]byte(line), &d); err != nil {
				t.Fatalf("%q: %v", line, err)
			}
			got = append(got, d.ID)
		}
		if !slices.Equal(got, tc.want) {
			t.Errorf("list %v: %v, want %v", tc.args, got, tc.want)
		}
	}
	table, _ := o.mustOperate(t, "dead-letters", "list")
	var got []string
	for line := range strings.Lines(table) {
		got = append(got, strings.Fields(line)[0])
	}
	if want := []string{"ID", third, young, old}; !slices.Equal(got, want) || strings.Contains(table, "secret") || strings.Contains(table, "\x1b") {
		t.Errorf("list, without payloads and control characters: got\n%s", table)
	}
	if _, said := o.mustOperate(t, "dead-letters", "list", "--limit=1"); !strings.Contains(said, "1 of 3 dead letters") {
		t.Errorf("said %q", said)
	}
	if _, said := o.mustOperate(t, "dead-letters", "list", "--event-type=none"); !strings.Contains(said, "no dead letter matches") {
		t.Errorf("said %q", said)
	}
}

func TestDeadLetterIsShownWhole(t *testing.T) {
	t.Parallel()
	o := newOutbox(t)
	id := o.insertDead(t, 5, "returned: no queue", event{aggregate: "7", eventType: "order.paid", payload: `{"total": 10}`, headers: `{"tenant": "x"}`})[0]
	shown, _ := o.mustOperate(t, "dead-letters", "show", id)
	wantReason(t, "show", shown, id, "dead letter", "order.paid", "returned: no queue", `{"total": 10}`, `{"tenant": "x"}`, "attempts        10")
	alive := o.insert(t, event{})[0]
	shown, _ = o.mustOperate(t, "dead-letters", "show", alive)
	wantReason(t, "show", shown, alive, "to be published")
	const unknown = "00000000-0000-4000-8000-000000000000"
	if code, stdout, stderr := o.operate(t, "dead-letters", "show", unknown); code != 1 || stdout != "" || !strings.Contains(stderr, "there is no event "+unknown) {
		t.Errorf("an unknown id: exit code %d, %s%s", code, stdout, stderr)
	}
}

// What is not understood, or not confirmed, changes nothing.
func TestDeadLettersAreNotTouchedByMistake(t *testing.T) {
	t.Parallel()
	o := newOutbox(t)
	ids := o.insertDead(t, 5, "returned", event{aggregate: "1"}, event{aggregate: "2"})
	alive := o.insert(t, event{})[0]
	before := o.fingerprint(t)
	for _, verb := range []string{"retry", "discard"} {
		for _, tc := range []struct {
			args []string
			code int
			want string
		}{
			{nil, 2, "neither ids nor a filter"},
			{[]string{"--yes"}, 2, "neither ids nor a filter"},
			{[]string{"--all", ids[0]}, 2, "--all: given together with"},
			{[]string{"7"}, 2, `<id>: "7" is not the id of an event`},
			{[]string{ids[0], "7"}, 2, `<id>: "7" is not the id of an event`},
			{[]string{"--event-type=", "--yes"}, 2, `--event-type: "" is not a text`},
			{[]string{"--since=yesterday"}, 2, `--since: "yesterday" is not a time`},
			{[]string{"--since=-2h"}, 2, `--since: "-2h" is not a time`},
			{[]string{"--all", "--yes", "--rate=0"}, 2, "--rate: 0 is not from 1"},
			{[]string{"--all", "--yes", "--rate=many"}, 2, `--rate: "many" is not a whole number`},
			{[]string{"--everything"}, 2, "unknown flag --everything"},
			{[]string{alive}, 1, "no dead letter has the ids given"},
			{[]string{"--aggregate-type=order"}, 5, "--yes"},
			{[]string{"--all"}, 5, "--yes"},
			{ids, 5, "--yes"},
			{[]string{"--event-type=none"}, 0, ""},
		} {
			code, stdout, stderr := o.operate(t, append([]string{"dead-letters", verb}, tc.args...)...)
			if code != tc.code || !strings.Contains(stderr, tc.want) {
				t.Errorf("%s %v: exit code %d, want %d and %q\n%s%s", verb, tc.args, code, tc.code, tc.want, stdout, stderr)
			}
			if tc.code == 4 && !strings.Contains(stdout, "2 dead letters would be") {
				t.Errorf("%s %v: no count in %q", verb, tc.args, stdout)
			}
		}
	}
	if o.fingerprint(t) != before {
		t.Error("something was changed")
	}
}

// With the fallback poll an hour away, only the command can have woken the relay.
func TestRetriedDeadLetterIsPublishedAtOnce(t *testing.T) {
	t.Parallel()
	bothOrderings(t, func(t *testing.T, ordering string) {
		o := newOutbox(t)
		q := testenv.Consume(t, o.amqpURL, exchange, "order.created")
		p := o.start(t, ordering, "FALLBACK_INTERVAL=1h", "MAX_ATTEMPTS=1")
		p.Ready(t)
		id := o.insert(t, event{eventType: "lost"})[0]
		o.waitDead(t, id)
		for range 3 { // the low-water mark passes the dead letter
			o.insertMany(t, 100, 100, "order.created")
			o.waitRowCount(t, "processed_at IS NULL", 1)
		}
		o.bind(t, q, "lost")
		stdout, stderr := o.mustOperate(t, "dead-letters", "retry", id)
		if !strings.Contains(stdout, "1 dead letter retried") {
			t.Errorf("said %q", stdout)
		}
		q.WaitFor(t, patience, "the retried event", holds(id))
		if r := o.waitProcessed(t, id); r.attempts != 0 || r.dead || r.lastError == "" {
			t.Errorf("row = %+v, want no attempts, and still the last error", r)
		}
		line := auditLine(t, stderr, "dead letters retried")
		if by, _ := line["by"].(string); line["count"] != 1.0 || line["command"] != "dead-letters retry" || !strings.Contains(by, "@") || fmt.Sprint(line["ids"]) != "["+id+"]" {
			t.Errorf("audit line %v", line)
		}
		if code, _, _ := o.operate(t, "dead-letters", "retry", id); code != 1 {
			t.Errorf("retried again: exit code %d, want 1", code)
		}
	})
}

// An event that is retried, and those that its dead letter held back, go in their order, while new
// events of the aggregate keep coming.
func TestHeldAggregateGoesOnInOrder(t *testing.T) {
	t.Parallel()
	for _, verb := range []string{"retry", "discard"} {
		t.Run(verb, func(t *testing.T) {
			t.Parallel()
			o := newOutbox(t)
			q := testenv.Consume(t, o.amqpURL, exchange, "order.created")
			p := o.start(t, "ON_DEAD_LETTER=hold", "FALLBACK_INTERVAL=1h", "MAX_ATTEMPTS=1")
			p.Ready(t)
			want := o.insert(t, event{aggregate: "held", eventType: "lost"})
			o.waitDead(t, want[0])
			want = append(want, o.insert(t, event{aggregate: "held"}, event{aggregate: "held"})...)
			held := want[1]
			o.bind(t, q, "lost")
			stop := make(chan struct{})
			var load sync.WaitGroup
			load.Go(func() { // keeps the relay awake, and its low-water mark moving
				for i := 0; ; i++ {
					select {
					case <-stop:
						return
					default:
						want = append(want, o.insert(t, event{aggregate: fmt.Sprint("other", i%50)}, event{aggregate: "held"})[1])
					}
				}
			})
			waitCount(t, q, 500)
			wantAbsent(t, q, held)
			_, stderr := o.mustOperate(t, "dead-letters", verb, "--aggregate-id=held")
			q.WaitFor(t, patience, "the first held event", holds(held))
			close(stop)
			load.Wait()
			if line := auditLine(t, stderr, "dead letters: "+verb); line["aggregate_id"] != "held" || line["count"] != 1.0 {
				t.Errorf("audit line %v", line)
			}
			o.waitRowCount(t, "processed_at IS NULL", 0)
			if verb == "discard" {
				wantAbsent(t, q, want[0])
				want = want[1:]
			}
			q.WaitFor(t, patience, "the last event", holds(want[len(want)-1]))
			var got []string
			for _, d := range q.Received() {
				if d.Headers["aggregate_id"] == "held" {
					got = append(got, d.MessageId)
				}
			}
			if !slices.Equal(got, want) {
				t.Errorf("%d events of the held aggregate came out of order, want %d in order", len(got), len(want))
			}
		})
	}
}

func TestDiscardedDeadLetterIsKeptAndNeverPublished(t *testing.T) {
	t.Parallel()
	o := newOutbox(t)
	q := testenv.Consume(t, o.amqpURL, exchange)
	ids := o.insertDead(t, 5, "returned: no queue", event{aggregate: "1"}, event{aggregate: "2"})
	p := o.start(t, "FALLBACK_INTERVAL=100ms")
	p.Ready(t)
	stdout, stderr := o.mustOperate(t, "dead-letters", "discard", "--error=no queue", "--yes")
	if !strings.Contains(stdout, "2 dead letters discarded") {
		t.Errorf("said %q", stdout)
	}
	if line := auditLine(t, stderr, "dead letters discarded"); line["count"] != 2.0 || !strings.Contains(fmt.Sprint(line["ids"]), ids[1]) {
		t.Errorf("audit line %v", line)
	}
	shown, _ := o.mustOperate(t, "dead-letters", "show", ids[0])
	wantReason(t, "show", shown, "discarded by ", "database user", "returned: no queue")
	if list, _ := o.mustOperate(t, "dead-letters", "list"); strings.Contains(list, ids[0]) {
		t.Errorf("still listed:\n%s", list)
	}
	if code, _, _ := o.operate(t, "dead-letters", "retry", ids[0]); code != 1 {
		t.Errorf("retry of a discarded event: exit code %d, want 1", code)
	}
	o.insert(t, event{aggregate: "1"}, event{aggregate: "2"})
	waitCount(t, q, 2)
	for _, id := range ids {
		wantAbsent(t, q, id)
	}
}

// Two persons share the work, whatever they were told about the count.
func TestDeadLettersRetriedByTwoAtOnce(t *testing.T) {
	t.Parallel()
	o := newOutbox(t)
	q := testenv.Consume(t, o.amqpURL, exchange)
	o.manyDead(t, 400, 40, "order.created")
	p := o.start(t)
	p.Ready(t)
	counts := make([]int, 2)
	var both sync.WaitGroup
	for i := range counts {
		both.Go(func() {
			_, stderr := o.mustOperate(t, "dead-letters", "retry", "--all", "--yes", "--rate=200")
			n, _ := auditLine(t, stderr, "dead letters retried")["count"].(float64)
			counts[i] = int(n)
		})
	}
	both.Wait()
	if counts[0]+counts[1] != 400 {
		t.Errorf("retried %v, want 400 in all", counts)
	}
	waitCount(t, q, 400)
	o.waitRowCount(t, "processed_at IS NOT NULL", 400)
	wantOnce(t, q)
	if stdout, _ := o.mustOperate(t, "dead-letters", "retry", "--all", "--yes"); !strings.Contains(stdout, "no dead letter matches") {
		t.Errorf("said %q", stdout)
	}
}

func TestInterruptedRetryIsGoneOnWith(t *testing.T) {
	t.Parallel()
	o := newOutbox(t)
	o.manyDead(t, 1000, 10, "order.created")
	p := testenv.StartCommand(t, []string{"DATABASE_URL=" + o.dsn}, "dead-letters", "retry", "--event-type=order.created", "--yes", "--rate=40")
	testenv.Eventually(t, patience, "some are retried", func() bool { return o.count(t, "dead_at IS NULL") > 0 })
	p.Signal(t, syscall.SIGINT)
	if code := p.Wait(t, patience); code != 1 {
		t.Errorf("exit code %d, want 1", code)
	}
	wantReason(t, "log", p.Logs(), "interrupted", "of 1000 dead letters retried", "the same command goes on with the rest")
	done := o.count(t, "dead_at IS NULL AND attempts = 0")
	if n, _ := auditLine(t, p.Logs(), "dead letters retried")["count"].(float64); int(n) != done || done == 1000 {
		t.Errorf("%v in the audit, %d in the table", n, done)
	}
	stdout, _ := o.mustOperate(t, "dead-letters", "retry", "--event-type=order.created", "--yes", "--rate=10000")
	if want := fmt.Sprintf("%d dead letters retried", 1000-done); !strings.Contains(stdout, want) {
		t.Errorf("said %q, want %q", stdout, want)
	}
	o.waitRowCount(t, "dead_at IS NULL AND attempts = 0", 1000)
}

// A row that another session holds is not waited for, and not forgotten either.
func TestLockedDeadLettersAreLeftAndSaid(t *testing.T) {
	t.Parallel()
	o := newOutbox(t)
	ids := o.insertDead(t, 5, "returned", event{aggregate: "1"}, event{aggregate: "2"}, event{aggregate: "3"})
	tx, err := o.db.BeginTx(t.Context(), nil)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = tx.Rollback() }()
	if _, err := tx.Exec("SELECT FROM outbox_events WHERE id = $1 FOR UPDATE", ids[1]); err != nil {
		t.Fatal(err)
	}
	code, stdout, stderr := o.operate(t, "dead-letters", "discard", "--all", "--yes")
	if code != 1 || !strings.Contains(stdout, "2 dead letters discarded") || !strings.Contains(stderr, "1 dead letter left, locked by other sessions") {
		t.Errorf("exit code %d\n%s%s", code, stdout, stderr)
	}
	if r := o.row(t, ids[1]); r.processed || !r.dead {
		t.Errorf("the locked row = %+v", r)
	}
}
