package test

import (
	"syscall"
	"testing"
	"time"

	"outbox-relay/internal/testenv"
)

// proxied is an outbox whose relay reaches both servers through links that a test can break.
type proxied struct {
	*outbox
	database, broker *testenv.Proxy
}

func newProxied(t *testing.T) *proxied {
	t.Helper()
	o := newOutbox(t)
	return &proxied{o, testenv.NewProxy(t, o.dsn), testenv.NewProxy(t, o.amqpURL)}
}

func (o *proxied) start(t *testing.T, env ...string) *testenv.Process {
	t.Helper()
	return testenv.Start(t, append([]string{"DATABASE_URL=" + o.database.URL, "AMQP_URL=" + o.broker.URL}, env...)...)
}

// Whatever state the relay is in, SIGTERM ends it within SHUTDOWN_TIMEOUT, and what it had in hand is not lost.
func TestRelayEndsInTimeInEveryState(t *testing.T) {
	t.Parallel()
	for name, arrange := range map[string]func(t *testing.T, o *proxied, p *testenv.Process){
		"asleep": func(*testing.T, *proxied, *testenv.Process) {},
		"the broker is down": func(t *testing.T, o *proxied, p *testenv.Process) {
			o.broker.Refuse()
			p.NotReady(t)
		},
		"the broker's link is stalled with events in flight": func(t *testing.T, o *proxied, p *testenv.Process) {
			o.broker.Stall()
			o.insertMany(t, 100, 10, "order.created")
			testenv.Eventually(t, patience, "events are in flight", func() bool { return p.Metric(t, "outbox_in_flight_events") > 0 })
		},
		"the database is down": func(t *testing.T, o *proxied, p *testenv.Process) {
			o.database.Refuse()
			p.NotReady(t)
		},
		"the database's link is stalled in a claim": func(t *testing.T, o *proxied, _ *testenv.Process) {
			o.database.Stall(testenv.ToClient)
			o.insertMany(t, 100, 10, "order.created")
		},
		"both links are stalled": func(t *testing.T, o *proxied, p *testenv.Process) {
			o.database.Stall()
			o.broker.Stall()
			p.NotReady(t)
		},
		"paused": func(t *testing.T, o *proxied, _ *testenv.Process) {
			o.mustOperate(t, "pause")
		},
		"all events wait for their retry": func(t *testing.T, o *proxied, _ *testenv.Process) {
			o.insertMany(t, 100, 10, "nobody.listens")
			o.waitRowCount(t, "retry_after IS NOT NULL", 10)
		},
		"standing by": func(t *testing.T, o *proxied, _ *testenv.Process) {
			other := o.outbox.start(t)
			other.WaitLog(t, patience, "standing by")
			if code := other.Stop(t); code != 0 {
				t.Errorf("the standby's exit code is %d", code)
			}
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			o := newProxied(t)
			q := testenv.ConsumeFrom(t, o.amqpURL, testenv.Binding{Exchange: exchange, Keys: []string{"order.#"}})
			p := o.start(t, "SHUTDOWN_TIMEOUT=6s", "RETRY_BASE=1h", "RETRY_MAX=1h")
			p.Ready(t)
			arrange(t, o, p)
			began := time.Now()
			p.Signal(t, syscall.SIGTERM)
			code := p.Wait(t, patience)
			// Twice the time: the machine may be busy, and a hang would take for ever.
			if took := time.Since(began); took > 12*time.Second {
				t.Errorf("it took %v to end, with SHUTDOWN_TIMEOUT=6s", took)
			}
			if code != 0 && code != 3 { // 3: something was in flight yet
				t.Errorf("exit code %d, want 0 or 3", code)
			}
			o.database.Resume()
			o.broker.Resume()
			o.mustOperate(t, "resume")
			o.outbox.start(t, "RETRY_BASE=1h", "RETRY_MAX=1h").Ready(t)
			o.waitRowCount(t, "processed_at IS NULL AND event_type = 'order.created'", 0)
			for id, n := range deliveries(q.Received()) {
				if n > 2 {
					t.Errorf("event %s came %d times", id, n)
				}
			}
		})
	}
}

// Links that are lost again and again leave nothing behind: no goroutine, no descriptor.
func TestReconnectsLeaveNothingBehind(t *testing.T) {
	t.Parallel()
	o := newProxied(t)
	q := testenv.Consume(t, o.amqpURL, exchange)
	p := o.start(t)
	p.Ready(t)
	reconnects := func() (n float64) {
		for _, server := range []string{"postgres", "listener", "rabbitmq"} {
			n += p.Metric(t, "outbox_reconnects_total", `server="`+server+`"`)
		}
		return n
	}
	connected := func() bool {
		for _, server := range []string{"postgres", "listener", "rabbitmq"} {
			if p.Metric(t, "outbox_connected", `server="`+server+`"`) != 1 {
				return false
			}
		}
		return true
	}
	round := func() {
		before := reconnects()
		o.database.Cut()
		o.broker.Cut()
		testenv.Eventually(t, patience, "the links are new", func() bool { return reconnects() >= before+2 && connected() })
		o.insert(t, event{})
		q.Next(t, patience)
	}
	for range 5 { // what there is once and for all
		round()
	}
	goroutines, files := p.Metric(t, "go_goroutines"), p.Metric(t, "process_open_fds")
	for reconnects() < 100 {
		round()
	}
	testenv.Eventually(t, patience, "goroutines and descriptors are as few as before", func() bool {
		return p.Metric(t, "go_goroutines") <= goroutines+5 && p.Metric(t, "process_open_fds") <= files+5
	})
}
