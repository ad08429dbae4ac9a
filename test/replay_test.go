package test

import (
	"fmt"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"outbox-relay/internal/testenv"
)

// published inserts events of some aggregates and has a relay publish them.
func (o *outbox) published(t *testing.T, n, aggregates int, eventType string) {
	t.Helper()
	o.insertMany(t, n, aggregates, eventType)
	p := o.start(t)
	o.waitRowCount(t, "processed_at IS NULL", 0)
	if code := p.Stop(t); code != 0 {
		t.Fatalf("relay: exit code %d", code)
	}
}

// wantReplayed waits for n messages and fails the test unless they are replays, each once, in the order of
// their outbox.
func (o *outbox) wantReplayed(t *testing.T, q *testenv.Queue, n int) {
	t.Helper()
	waitCount(t, q, n)
	committed := o.committed(t)
	var last int64
	for _, d := range q.Received() {
		e, ok := committed[d.MessageId]
		if !ok || d.Headers["replay"] != true {
			t.Fatalf("message %s, headers %v: want a replay of an event", d.MessageId, d.Headers)
		}
		if e.seq <= last {
			t.Fatalf("seq %d after %d", e.seq, last)
		}
		last = e.seq
	}
	if got := len(q.Received()); got != n {
		t.Errorf("%d messages, want %d", got, n)
	}
}

// A new consumer gets what was published before it came, on a queue of its own, while the relay works. The
// rows stay as they are.
func TestReplayToANewConsumer(t *testing.T) {
	t.Parallel()
	o := newOutbox(t)
	live := testenv.Consume(t, o.amqpURL, exchange)
	o.published(t, 300, 20, "order.created")
	o.published(t, 50, 20, "order.paid")
	waitCount(t, live, 350)
	before := o.fingerprint(t)
	q := testenv.ConsumeFrom(t, o.amqpURL, testenv.Binding{Queue: "new-consumer"})
	o.start(t).Ready(t)
	toNew := []string{"--amqp-exchange=", "--amqp-routing-key=new-consumer"}

	stdout, _ := o.mustOperate(t, slices.Concat([]string{"replay", "--event-type=order.created", "--dry-run"}, toNew)...)
	wantReason(t, "dry run", stdout, "300 events, from seq 1,")
	code, stdout, stderr := o.operate(t, slices.Concat([]string{"replay", "--event-type=order.created"}, toNew)...)
	if code != 5 || !strings.Contains(stderr, "--yes") {
		t.Errorf("without --yes: exit code %d, %s%s", code, stdout, stderr)
	}
	if n := len(q.Received()); n != 0 {
		t.Fatalf("%d messages were sent without being asked for", n)
	}

	stdout, stderr = o.mustOperate(t, slices.Concat([]string{"replay", "--event-type=order.created", "--yes", "--rate=100000"}, toNew)...)
	wantReason(t, "output", stdout, "300 events sent again")
	o.wantReplayed(t, q, 300)
	if line := auditLine(t, stderr, "replayed"); line["count"] != 300.0 {
		t.Errorf("audit = %v", line)
	}
	if o.fingerprint(t) != before {
		t.Error("the rows were changed")
	}
	if n := len(live.Received()); n != 350 {
		t.Errorf("the usual queue got %d messages, want 350", n)
	}
}

// An interrupted replay says where it got to, and goes on from there.
func TestReplayIsResumed(t *testing.T) {
	t.Parallel()
	o := newOutbox(t)
	testenv.Consume(t, o.amqpURL, exchange)
	o.published(t, 200, 10, "order.created")
	q := testenv.ConsumeFrom(t, o.amqpURL, testenv.Binding{Queue: "again"})
	args := []string{"replay", "--all", "--yes", "--amqp-exchange=", "--amqp-routing-key=again"}
	p := testenv.StartCommand(t, []string{"DATABASE_URL=" + o.dsn, "AMQP_URL=" + o.amqpURL}, append(args, "--rate=40")...)
	waitCount(t, q, 30)
	p.Signal(t, syscall.SIGINT)
	if code := p.Wait(t, patience); code != 1 {
		t.Errorf("interrupted: exit code %d, want 1", code)
	}
	_, rest, found := strings.Cut(p.Logs(), "--after=")
	if !found {
		t.Fatalf("it does not say where it got to:\n%s", p.Logs())
	}
	after, _, _ := strings.Cut(rest, " ")
	sent := len(q.Received())
	if sent == 0 || sent >= 200 {
		t.Fatalf("%d messages were sent before", sent)
	}
	o.mustOperate(t, append(args, "--rate=100000", "--after="+after)...)
	o.wantReplayed(t, q, 200)
}

func TestReplayChoosesByIDAndTime(t *testing.T) {
	t.Parallel()
	o := newOutbox(t)
	live := testenv.Consume(t, o.amqpURL, exchange)
	o.published(t, 10, 10, "order.created")
	waitCount(t, live, 10)
	ids := testenv.Query[string](t, o.dsn, "SELECT id FROM outbox_events ORDER BY seq")
	testenv.Exec(t, o.dsn, "UPDATE outbox_events SET processed_at = now() - interval '3 hours' WHERE seq <= 4")
	testenv.Exec(t, o.dsn, "UPDATE outbox_events SET dead_at = now() WHERE id = $1", ids[9]) // discarded
	for _, tc := range []struct {
		args []string
		want string
	}{
		{[]string{"--since=1h"}, "5 events, from seq 5,"},
		{[]string{"--until=1h"}, "4 events, from seq 1,"},
		{[]string{"--since=4h", "--until=2h", "--after=2"}, "2 events, from seq 3,"},
		{[]string{ids[6]}, "1 event, from seq 7,"},
		{[]string{"--aggregate-id=nobody"}, "no published event matches"},
	} {
		stdout, _ := o.mustOperate(t, slices.Concat([]string{"replay", "--dry-run"}, tc.args)...)
		wantReason(t, strings.Join(tc.args, " "), stdout, tc.want)
	}
	if code, _, stderr := o.operate(t, "replay", ids[9]); code != 1 || !strings.Contains(stderr, "no published event") {
		t.Errorf("an id that is none of a published event: exit code %d, %s", code, stderr)
	}
	stdout, _ := o.mustOperate(t, "replay", ids[6]) // one needs no --yes
	wantReason(t, "output", stdout, "1 event sent again")
	q := live.Collect(t, 11, patience)
	if d := q[10]; d.MessageId != ids[6] || d.Headers["replay"] != true {
		t.Errorf("got %s, headers %v", d.MessageId, d.Headers)
	}
}

// The first failure ends a replay: the order must hold when it goes on.
func TestReplayStopsAtTheFirstFailure(t *testing.T) {
	t.Parallel()
	o := newOutbox(t)
	live := testenv.Consume(t, o.amqpURL, exchange)
	o.published(t, 100, 10, "order.created")
	waitCount(t, live, 100)
	before := o.fingerprint(t)
	for name, tc := range map[string]struct {
		args []string
		want string
	}{
		"no queue":          {[]string{"--amqp-exchange=", "--amqp-routing-key=nobody"}, "returned by the broker: 312 NO_ROUTE"},
		"no exchange":       {[]string{"--amqp-exchange=missing"}, "no exchange 'missing'"},
		"a missing header":  {[]string{"--amqp-routing-key={header.region}"}, "region"},
		"another broker":    {[]string{"--amqp-url=amqp://relay:hunter2@127.0.0.1:1/"}, "connect to amqp://relay@127.0.0.1:1/"},
		"nothing is meant":  {nil, "--all"},
		"a strange filter":  {[]string{"--since=yesterday"}, "--since"},
		"an empty span":     {[]string{"--since=1h", "--until=2h"}, "--until: 2h0m0s ago is not after --since, 1h0m0s ago"},
		"a negative --rate": {[]string{"--rate=-1"}, "--rate"},
	} {
		args := append([]string{"replay", "--yes"}, tc.args...)
		if tc.args != nil {
			args = append(args, "--all")
		}
		began := time.Now()
		code, stdout, stderr := o.operate(t, args...)
		if name == "no queue" { // it had begun
			if line := auditLine(t, stderr, "replayed"); line["level"] != "ERROR" || line["count"] != 0.0 || !strings.Contains(fmt.Sprint(line["err"]), "NO_ROUTE") {
				t.Errorf("audit = %v", line)
			}
		}
		if code == 0 || !strings.Contains(stderr, tc.want) || strings.Contains(stdout+stderr, "hunter2") {
			t.Errorf("%s: exit code %d, %s%s", name, code, stdout, stderr)
		}
		if took := time.Since(began); took > patience {
			t.Errorf("%s: took %v", name, took)
		}
	}
	if n := len(live.Received()); n != 100 {
		t.Errorf("%d messages, want the first 100 only", n)
	}
	if o.fingerprint(t) != before {
		t.Error("the rows were changed")
	}
}
