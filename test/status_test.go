package test

import (
	"encoding/json"
	"net/url"
	"strings"
	"syscall"
	"testing"

	"outbox-relay/internal/testenv"
)

// status is what a script reads of `outbox-relay status --json`; docs/commands.md has the rest.
type status struct {
	Paused bool   `json:"paused"`
	By     string `json:"paused_by"`
	Relays []struct {
		PID       int    `json:"pid"`
		Works     bool   `json:"works"`
		Address   string `json:"address"`
		Broker    bool   `json:"broker_usable"`
		Listening bool   `json:"listen_works"`
	} `json:"relays"`
	Doorbell struct {
		State   string `json:"state"`
		Writers int    `json:"silent_writers"`
	} `json:"doorbell"`
	Pending, InBackoff, DeadLetters count
	Oldest                          *float64 `json:"oldest_pending_seconds"`
	RateIn                          float64  `json:"rate_in_per_second"`
	RateOut                         float64  `json:"rate_out_per_second"`
	LastError                       string   `json:"last_error"`
	HeldAggregates                  count    `json:"held_aggregates"`
	Held                            []struct {
		ID        string `json:"aggregate_id"`
		EventID   string `json:"event_id"`
		Dead      bool   `json:"dead"`
		LastError string `json:"last_error"`
		Waiting   count  `json:"waiting"`
	} `json:"held"`
}

type count struct {
	N       int  `json:"count"`
	AtLeast bool `json:"at_least"`
}

func (s *status) UnmarshalJSON(b []byte) error {
	type plain status
	more := struct {
		*plain
		Pending     *count `json:"pending"`
		InBackoff   *count `json:"in_backoff"`
		DeadLetters *count `json:"dead_letters"`
	}{(*plain)(s), &s.Pending, &s.InBackoff, &s.DeadLetters}
	return json.Unmarshal(b, &more)
}

// ask runs a command of a person, which must succeed, and returns what it printed and what it logged.
func (o *outbox) ask(t *testing.T, env []string, args ...string) (stdout, stderr string) {
	t.Helper()
	code, stdout, stderr := testenv.Command(t, append([]string{"DATABASE_URL=" + o.dsn}, env...), args...)
	if code != 0 {
		t.Fatalf("%s: exit code %d\n%s%s", strings.Join(args, " "), code, stdout, stderr)
	}
	return stdout, stderr
}

func (o *outbox) status(t *testing.T, env ...string) (s status) {
	t.Helper()
	out, _ := o.ask(t, env, "status", "--json")
	if err := json.Unmarshal([]byte(out), &s); err != nil {
		t.Fatalf("%v in %s", err, out)
	}
	return s
}

// waitStatus asks until the status is as cond says.
func (o *outbox) waitStatus(t *testing.T, what string, cond func(status) bool) (s status) {
	t.Helper()
	testenv.Eventually(t, patience, what, func() bool {
		s = o.status(t)
		return cond(s)
	})
	return s
}

func TestStatusOfRelaysAtWork(t *testing.T) {
	t.Parallel()
	o := newOutbox(t)
	none := o.status(t)
	if len(none.Relays) != 0 || none.Doorbell.State != "deaf" || none.Oldest != nil {
		t.Errorf("status without a relay = %+v", none)
	}
	testenv.Consume(t, o.amqpURL, exchange)
	first := o.start(t)
	waitLeader(t, first, true)
	o.start(t).Ready(t)
	s := o.waitStatus(t, "one relay works, listens and sleeps, and one stands by", func(s status) bool {
		return len(s.Relays) == 2 && s.Relays[0].Works && s.Relays[0].Broker && s.Relays[0].Listening &&
			!s.Relays[1].Works && s.Relays[1].Broker && s.Doorbell.State == "asleep"
	})
	if s.Pending.N != 0 || s.LastError != "" || s.Paused {
		t.Errorf("status = %+v", s)
	}
	table, _ := o.ask(t, nil, "status")
	wantReason(t, "table", table, "\nworks ", "\nstands by ", "LISTEN works", "asleep")

	l := o.startLoad(t)
	o.waitStatus(t, "events come in and go out", func(s status) bool { return s.RateIn > 1 && s.RateOut > 1 })
	l.stop()
}

// A crowd of failing events, each of which holds others back.
func TestStatusOfHeldAggregates(t *testing.T) {
	t.Parallel()
	o := newOutbox(t)
	q := testenv.ConsumeFrom(t, o.amqpURL, testenv.Binding{Exchange: exchange, Keys: []string{"good"}})
	o.start(t, "RETRY_BASE=1h", "RETRY_MAX=1h").Ready(t)
	bad := o.insert(t, event{aggregate: "held", eventType: "bad"},
		event{aggregate: "held", eventType: "good"}, event{aggregate: "held", eventType: "good"},
		event{aggregate: "other", eventType: "bad"}, event{aggregate: "free", eventType: "good"})[0]
	q.Collect(t, 1, patience)
	s := o.waitStatus(t, "two events have failed", func(s status) bool { return s.InBackoff.N == 2 && s.Pending.N == 4 })
	if s.Pending.N != 4 || s.HeldAggregates.N != 2 || s.Oldest == nil {
		t.Errorf("status = %+v", s)
	}
	if h := s.Held[0]; h.ID != "held" || h.EventID != bad || h.Waiting.N != 2 || h.Dead || !strings.Contains(h.LastError, "returned") {
		t.Errorf("held first = %+v", h)
	}
	testenv.Exec(t, o.dsn, "UPDATE outbox_events SET dead_at = now(), retry_after = NULL WHERE id = $1", bad)
	if s := o.status(t); s.DeadLetters.N != 1 || s.HeldAggregates.N != 1 {
		t.Errorf("a dead letter counts as held: %+v", s)
	}
	// The relay goes on after dead letters, and so in time publishes the two behind it.
	dead := false
	held := o.status(t, "ON_DEAD_LETTER=hold")
	for _, h := range held.Held {
		dead = dead || h.EventID == bad && h.Dead
	}
	if held.HeldAggregates.N != 2 || !dead {
		t.Errorf("with ON_DEAD_LETTER=hold, held = %+v", held.Held)
	}
}

func TestStatusWhileTheBrokerIsDown(t *testing.T) {
	t.Parallel()
	o := newOutbox(t)
	broker := testenv.NewProxy(t, o.amqpURL)
	p := testenv.Start(t, "DATABASE_URL="+o.dsn, "AMQP_URL="+broker.URL)
	p.Ready(t)
	broker.Refuse()
	broker.Cut()
	s := o.waitStatus(t, "the relay shows that the broker is gone", func(s status) bool {
		return len(s.Relays) == 1 && !s.Relays[0].Broker && s.LastError != ""
	})
	if s.Doorbell.State != "deaf" {
		t.Errorf("doorbell = %s, want deaf", s.Doorbell.State)
	}
	wantReason(t, "last error", s.LastError, "rabbitmq: ")
	broker.Resume()
	o.waitStatus(t, "the broker is back", func(s status) bool { return s.Relays[0].Broker && s.Doorbell.State == "asleep" })
}

func TestStatusNamesASilentWriter(t *testing.T) {
	t.Parallel()
	o := newOutbox(t)
	tx, err := o.db.BeginTx(t.Context(), nil)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = tx.Rollback() }()
	_, err = tx.ExecContext(t.Context(),
		`INSERT INTO outbox_events (aggregate_type, aggregate_id, event_type, payload) VALUES ('order', '1', 'x', '{}')`)
	if err != nil {
		t.Fatal(err)
	}
	if s := o.status(t); s.Doorbell.Writers != 1 || s.Pending.N != 0 {
		t.Errorf("status = %+v, want one silent writer", s)
	}
}

// 100,000 processed rows and as many pending ones.
func TestStatusOfALargeTable(t *testing.T) {
	t.Parallel()
	o := newOutbox(t)
	o.insertMany(t, 100_000, 1000, "done")
	testenv.Exec(t, o.dsn, "UPDATE outbox_events SET processed_at = now()")
	o.insertMany(t, 100_000, 1000, "pending")
	if s := o.status(t); s.Pending != (count{100_000, true}) { // where counting stops
		t.Errorf("pending = %+v, want at least 100000", s.Pending)
	}
	testenv.Exec(t, o.dsn, "UPDATE outbox_events SET processed_at = now() WHERE seq % 2 = 0")
	if s := o.status(t); s.Pending != (count{50_000, false}) {
		t.Errorf("pending = %+v, want 50000", s.Pending)
	}
}

// A role that may do nothing but what the relay needs sees all but times and addresses of others.
func TestStatusWithFewRights(t *testing.T) {
	t.Parallel()
	o := newOutbox(t)
	o.start(t).Ready(t)
	name := "few_rights_" + strings.ToLower(t.Name())
	testenv.Exec(t, o.dsn, `CREATE ROLE `+name+` LOGIN PASSWORD 'secret-word';
		GRANT SELECT ON outbox_events, outbox_relay_state TO `+name)
	t.Cleanup(func() { testenv.Exec(t, o.dsn, "DROP OWNED BY "+name+"; DROP ROLE "+name) })
	u, err := url.Parse(o.dsn)
	if err != nil {
		t.Fatal(err)
	}
	u.User = url.UserPassword(name, "secret-word")
	few := &outbox{dsn: u.String()}
	if s := few.status(t); len(s.Relays) != 1 || !s.Relays[0].Works || s.Relays[0].Address != "" {
		t.Errorf("relays = %+v", s.Relays)
	}
	testenv.Exec(t, o.dsn, "REVOKE ALL ON outbox_relay_state FROM "+name)
	for _, args := range [][]string{{"status"}, {"pause"}, {"resume"}} {
		wantRefused(t, few.dsn, 1, args, "lacks a right", "roles.sql")
	}
	if s := o.status(t); s.Paused {
		t.Error("paused by a role that may not")
	}
}

// wantRefused runs a command that must fail with that code and say these things, and no password.
func wantRefused(t *testing.T, dsn string, code int, args []string, parts ...string) {
	t.Helper()
	got, stdout, stderr := testenv.Command(t, []string{"DATABASE_URL=" + dsn}, args...)
	if got != code {
		t.Errorf("%s: exit code %d, want %d", strings.Join(args, " "), got, code)
	}
	wantReason(t, strings.Join(args, " "), stderr, parts...)
	if strings.Contains(stdout+stderr, "secret-word") {
		t.Errorf("%s shows the password: %s%s", strings.Join(args, " "), stdout, stderr)
	}
}

func TestCommandsOnAnOutboxTheyCannotUse(t *testing.T) {
	t.Parallel()
	empty := testenv.Database(t)
	const down = "postgres://relay:secret-word@127.0.0.1:1/shop?sslmode=disable"
	for _, args := range [][]string{{"status"}, {"status", "--json"}, {"pause"}, {"resume"}} {
		wantRefused(t, empty, 1, args, "outbox_events does not exist", "outbox-relay migrate")
		wantRefused(t, down, 1, args, "connect to PostgreSQL", "refused")
		wantRefused(t, "", 2, args, "DATABASE_URL: not set")
	}
	foreign := testenv.Database(t)
	testenv.Exec(t, foreign, "CREATE TABLE outbox_events (id int PRIMARY KEY, payload text)")
	const left = "SELECT string_agg(relname, ' ') FROM pg_class WHERE relnamespace = 'public'::regnamespace"
	before := testenv.Value[string](t, foreign, left)
	for _, args := range [][]string{{"status"}, {"pause"}, {"resume"}, {"migrate"}, {"dead-letters", "list"}} {
		wantRefused(t, foreign, 2, args, "is not an outbox of ours", "column id is integer, not uuid",
			"it has no columns aggregate_type, aggregate_id, event_type, attempts, created_at, processed_at", "search_path")
	}
	for dsn, say := range map[string]string{
		foreign: `table outbox_events of schema \"public\" is there and is not an outbox of ours`,
		empty:   "table outbox_events does not exist in the search_path: run `outbox-relay migrate`",
	} {
		p := testenv.Start(t, "DATABASE_URL="+dsn, "AMQP_URL=amqp://relay@127.0.0.1:1/")
		wantReason(t, "/readyz", p.NotReady(t), "starting")
		p.WaitLog(t, patience, `work the outbox: failing","server":"postgres","err":"`+say)
		p.WaitLog(t, patience, `count the backlog: failing","server":"postgres","err":"`+say)
	}
	if after := testenv.Value[string](t, foreign, left); after != before {
		t.Errorf("in another's schema there is %s, and there was %s", after, before)
	}
	o := newOutbox(t)
	wantRefused(t, o.dsn, 2, []string{"status", "--interval=soon"}, `--interval: "soon" is not a duration`)
	wantRefused(t, o.dsn, 2, []string{"status", "--interval=1"}, "configuration: 1 fault\n", `--interval: "1" is not a duration like 500ms`)
	wantRefused(t, o.dsn, 2, []string{"status", "--watch", "--interval=1ms"}, "--interval: 1ms is under 1s")
	wantRefused(t, o.dsn, 2, []string{"status", "--interval=2s"}, "--interval: has no meaning without --watch")
	wantRefused(t, o.dsn, 2, []string{"pause", "now"}, "unexpected argument")
	wantRefused(t, o.dsn, 2, []string{"pause", "--reason=" + strings.Repeat("x", 1000)}, "--reason: over 500 bytes")
	if s := o.status(t); s.Paused {
		t.Error("paused by a command that was refused")
	}
}

func TestStatusKeepsLooking(t *testing.T) {
	t.Parallel()
	o := newOutbox(t)
	db := testenv.NewProxy(t, o.dsn)
	p := testenv.StartCommand(t, []string{"DATABASE_URL=" + db.URL}, "status", "--watch", "--json", "--interval=1s")
	p.WaitLog(t, patience, `"pending":{"count":0`)
	db.Refuse()
	db.Cut()
	p.WaitLog(t, patience, "outbox-relay: ") // what is wrong
	o.insert(t, event{}, event{}, event{})
	db.Resume()
	p.WaitLog(t, patience, `"pending":{"count":3`)
	p.Signal(t, syscall.SIGINT)
	if code := p.Wait(t, patience); code != 0 {
		t.Errorf("exit code %d, want 0", code)
	}
}
