package test

import (
	"net/http"
	"net/url"
	"strings"
	"testing"
	"time"

	amqp "github.com/rabbitmq/amqp091-go"

	"outbox-relay/internal/testenv"
)

// An outage that holds for all events alike costs time and never an attempt, and readiness says
// what it is. It ends without a restart.
func TestOutagesCountNoAttempt(t *testing.T) {
	t.Parallel()
	for _, tt := range []struct {
		name     string
		settings []string
		missing  bool // the exchange is not there at first
		begin    func(t *testing.T, l *login)
		end      func(t *testing.T, l *login)
		reasons  []string // of readiness, and in the log
	}{
		{
			name: "no exchange", settings: []string{"AMQP_DECLARE=false"}, missing: true,
			reasons: []string{`check exchange "outbox"`, "404", "no exchange 'outbox'"},
		},
		{
			name:    "no right to declare",
			begin:   func(t *testing.T, l *login) { l.permit(t, "", ".*") },
			end:     func(t *testing.T, l *login) { l.permit(t, ".*", ".*") },
			reasons: []string{`declare exchange "outbox"`, "403", "configure access to exchange 'outbox'"},
		},
		{
			name: "no right to publish", settings: []string{"AMQP_DECLARE=false"},
			begin:   func(t *testing.T, l *login) { l.permit(t, ".*", "") },
			end:     func(t *testing.T, l *login) { l.permit(t, ".*", ".*") },
			reasons: []string{"403", "write access to exchange 'outbox'", "refused for user"},
		},
		{
			name:    "password wrong",
			begin:   func(t *testing.T, l *login) { l.password(t, "another-one") },
			end:     func(t *testing.T, l *login) { l.password(t, loginPassword) },
			reasons: []string{"403", "username or password not allowed"},
		},
		{
			name:    "connection limit",
			begin:   func(t *testing.T, l *login) { l.limit(t, http.MethodPut, 0) },
			end:     func(t *testing.T, l *login) { l.limit(t, http.MethodDelete, 0) },
			reasons: []string{"530", "connection limit (0) is reached"},
		},
		{
			name:    "no right to the vhost",
			begin:   func(t *testing.T, l *login) { l.forbid(t) },
			end:     func(t *testing.T, l *login) { l.permit(t, ".*", ".*") },
			reasons: []string{"530", "access to vhost", "refused for user"},
		},
	} {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			o := newOutbox(t)
			l := o.newLogin(t)
			var q *testenv.Queue
			if !tt.missing {
				q = testenv.Consume(t, o.amqpURL, exchange)
			}
			if tt.begin != nil {
				tt.begin(t, l)
			}
			p := o.start(t, append(tt.settings, "AMQP_URL="+l.url, "MAX_ATTEMPTS=1", "FALLBACK_INTERVAL=200ms")...)
			waitLeader(t, p, true)
			o.insertMany(t, 100, 10, "order.created")
			o.waitNotReady(t, p, tt.reasons)
			wantReason(t, "log", strings.ReplaceAll(p.Logs(), `\"`, `"`), tt.reasons...)
			for until := time.Now().Add(2 * time.Second); time.Now().Before(until); time.Sleep(10 * time.Millisecond) { // several attempts
				if status, body := p.Get(t, "/readyz"); status == http.StatusOK {
					t.Fatalf("ready for a moment: %s", body)
				}
			}
			if n := strings.Count(p.Logs(), "use RabbitMQ"); n > 3 { // a change of the reason, and one a minute
				t.Errorf("%d lines in the log about one outage\n%s", n, p.Logs())
			}
			o.wantUncounted(t, p)

			if tt.missing {
				q = testenv.Consume(t, o.amqpURL, exchange)
			}
			if tt.end != nil {
				tt.end(t, l)
			}
			o.verify(t, q, nil, 0)
			p.Ready(t)
			o.wantUncounted(t, p)
			if n := outcomes(t, p, "confirmed"); n != 100 {
				t.Errorf("%d confirmed, want 100", n)
			}
			if strings.Contains(p.Logs(), loginPassword) {
				t.Error("the password is in the log")
			}
		})
	}
}

// The same while the relay runs: what was in flight is sent again and nothing else happens to it.
func TestExchangeDeletedUnderLoad(t *testing.T) {
	t.Parallel()
	bothOrderings(t, func(t *testing.T, ordering string) {
		const batch = 50
		o := newOutbox(t)
		q := testenv.Consume(t, o.amqpURL, exchange)
		p := o.start(t, ordering, "AMQP_DECLARE=false", "MAX_ATTEMPTS=1", "BATCH_SIZE="+itoa(batch))
		l := o.startLoad(t)
		waitPublished(t, p, 50)
		ch := o.channel(t)
		if err := ch.ExchangeDelete(exchange, false, false); err != nil {
			t.Fatal(err)
		}
		o.waitNotReady(t, p, []string{"404", "no exchange 'outbox'"})
		o.wantUncounted(t, p)
		o.makeExchange(t, ch, q)
		waitPublished(t, p, 50)
		p.Ready(t)
		l.stop()
		o.verifyUnordered(t, q, l.rolledBack, 2*batch)
		o.wantUncounted(t, p)
	})
}

// makeExchange makes the exchange as one step: bound by way of another, it would have no queue for
// a moment, and what came then would be returned.
func (o *outbox) makeExchange(t *testing.T, ch *amqp.Channel, q *testenv.Queue) {
	t.Helper()
	const fallback = "fallback"
	if err := ch.ExchangeDeclare(fallback, amqp.ExchangeFanout, true, false, false, false, nil); err != nil {
		t.Fatal(err)
	}
	if err := ch.QueueBind(q.Name, "", fallback, false, nil); err != nil {
		t.Fatal(err)
	}
	if err := ch.ExchangeDeclare(exchange, amqp.ExchangeTopic, true, false, false, false, amqp.Table{"alternate-exchange": fallback}); err != nil {
		t.Fatal(err)
	}
}

// Rights are cached with a channel, so that they change for a running relay when it connects anew.
func TestPermissionTakenAwayUnderLoad(t *testing.T) {
	t.Parallel()
	const batch = 50
	o := newOutbox(t)
	login := o.newLogin(t)
	q := testenv.Consume(t, o.amqpURL, exchange)
	p := o.start(t, "AMQP_URL="+login.url, "AMQP_DECLARE=false", "MAX_ATTEMPTS=1", "BATCH_SIZE="+itoa(batch))
	l := o.startLoad(t)
	waitPublished(t, p, 50)
	login.permit(t, ".*", "")
	// The management API learns of a connection some seconds after it was made.
	testenv.Eventually(t, patience, "the relay meets the refusal", func() bool {
		login.disconnect(t)
		return strings.Contains(p.Logs(), "write access to exchange 'outbox'")
	})
	o.waitNotReady(t, p, []string{"403", "refused for user"})
	o.wantUncounted(t, p)
	login.permit(t, ".*", ".*")
	waitPublished(t, p, 50)
	p.Ready(t)
	l.stop()
	o.verify(t, q, l.rolledBack, 4*batch)
	o.wantUncounted(t, p)
}

// waitNotReady waits until readiness says no for these reasons: it may pass through others.
func (o *outbox) waitNotReady(t *testing.T, p *testenv.Process, reasons []string) {
	t.Helper()
	var status int
	var body string
	testenv.Eventually(t, patience, "readiness says "+strings.Join(reasons, ", "), func() bool {
		status, body = p.Get(t, "/readyz")
		for _, reason := range reasons {
			if !strings.Contains(body, reason) {
				return false
			}
		}
		return status == http.StatusServiceUnavailable
	})
	if status, body := p.Get(t, "/livez"); status != http.StatusOK {
		t.Errorf("/livez = %d %s during an outage of the broker, want 200", status, body)
	}
}

// wantUncounted fails the test if anything was noted of an event, or counted as a failure of one.
func (o *outbox) wantUncounted(t *testing.T, p *testenv.Process) {
	t.Helper()
	if n := o.count(t, "attempts <> 0 OR last_error IS NOT NULL OR dead_at IS NOT NULL OR retry_after IS NOT NULL"); n != 0 {
		t.Errorf("an outage left its mark on %d events", n)
	}
	wantFailures(t, p, "order.created", 0)
}

// login is a user of the broker for the relay alone, whose rights a test may take away.
type login struct {
	name, vhost string
	url         string // with a password that works
}

// newLogin makes a user with all rights in the outbox's vhost.
func (o *outbox) newLogin(t *testing.T) *login {
	t.Helper()
	u, err := url.Parse(o.amqpURL)
	if err != nil {
		t.Fatal(err)
	}
	l := &login{vhost: strings.TrimPrefix(u.Path, "/")}
	// A vhost is one test's, and its name ends in a number. Short, since readiness cuts long reasons.
	l.name = "relay" + l.vhost[strings.LastIndexByte(l.vhost, '_'):]
	l.password(t, loginPassword)
	t.Cleanup(func() { testenv.API(t, http.MethodDelete, "/users/"+l.name, nil, nil) })
	l.permit(t, ".*", ".*")
	u.User = url.UserPassword(l.name, loginPassword)
	l.url = u.String()
	return l
}

const loginPassword = "correct-horse" // not one that a log line could hold by chance

func (l *login) password(t *testing.T, password string) {
	t.Helper()
	testenv.API(t, http.MethodPut, "/users/"+l.name, map[string]string{"password": password, "tags": ""}, nil)
}

// permit sets what the user may configure and write.
func (l *login) permit(t *testing.T, configure, write string) {
	t.Helper()
	testenv.API(t, http.MethodPut, "/permissions/"+l.vhost+"/"+l.name,
		map[string]string{"configure": configure, "write": write, "read": ".*"}, nil)
}

// disconnect has the broker close the user's connections: rights are cached with them.
func (l *login) disconnect(t *testing.T) {
	t.Helper()
	testenv.API(t, http.MethodDelete, "/connections/username/"+l.name, nil, nil)
}

// limit sets or removes the number of connections the user may have.
func (l *login) limit(t *testing.T, method string, n int) {
	t.Helper()
	testenv.API(t, method, "/user-limits/"+l.name+"/max-connections", map[string]int{"value": n}, nil)
}

// forbid takes away all that the user may do in the vhost.
func (l *login) forbid(t *testing.T) {
	t.Helper()
	testenv.API(t, http.MethodDelete, "/permissions/"+l.vhost+"/"+l.name, nil, nil)
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
	t.Parallel()
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
