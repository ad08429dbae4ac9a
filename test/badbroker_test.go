package test

import (
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"time"

	"outbox-relay/internal/testenv"
)

// Whatever answers at the broker's address, the relay lives, says what it met, goes on to the next
// address of the list, and ends when told to.
func TestSomethingElseAnswersInPlaceOfTheBroker(t *testing.T) {
	t.Parallel()
	web := httptest.NewServer(http.NotFoundHandler())
	t.Cleanup(web.Close)
	tls := httptest.NewTLSServer(http.NotFoundHandler())
	t.Cleanup(tls.Close)
	for name, addr := range map[string]string{
		"an HTTP server": web.Listener.Addr().String(),
		"a TLS port":     tls.Listener.Addr().String(),
		"garbage": serveTCP(t, func(c net.Conn) {
			_, _ = io.CopyN(io.Discard, c, 8) // the protocol header
			for range 1000 {
				if _, err := c.Write([]byte("\x01\x00\x00\xff\xff\xff\xff what is this? \xce\x00")); err != nil {
					return
				}
			}
		}),
		"nobody who speaks":  serveTCP(t, func(c net.Conn) { _, _ = io.Copy(io.Discard, c) }),
		"a port that closes": serveTCP(t, func(net.Conn) {}),
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			o := newOutbox(t)
			q := testenv.Consume(t, o.amqpURL, exchange)
			wrong := "amqp://relay:hunter2@" + addr + "/"
			alone := testenv.Start(t, "DATABASE_URL="+o.dsn, "AMQP_URL="+wrong)
			o.insert(t, event{})
			alone.WaitLog(t, patience, "connect to amqp://relay@"+addr)
			reasons := alone.NotReady(t)
			wantReason(t, "/readyz", reasons, "rabbitmq")
			testenv.Eventually(t, patience, "failed attempts are counted", func() bool {
				return alone.Metric(t, "outbox_connection_failures_total", `server="rabbitmq"`) > 0
			})
			began := time.Now()
			if code := alone.Stop(t); code != 0 {
				t.Errorf("exit code %d, want 0", code)
			}
			if took := time.Since(began); took > patience/2 {
				t.Errorf("SIGTERM took %v", took)
			}
			if strings.Contains(alone.Logs()+reasons, "hunter2") {
				t.Error("a password is shown")
			}
			testenv.Start(t, "DATABASE_URL="+o.dsn, "AMQP_URL="+wrong+","+o.amqpURL).Ready(t)
			waitCount(t, q, 1)
			o.wantUntouched(t)
		})
	}
}

// serveTCP serves each connection to its end, then closes it.
func serveTCP(t *testing.T, serve func(net.Conn)) (addr string) {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = l.Close() })
	go func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			go func() {
				defer func() { _ = c.Close() }()
				serve(c)
			}()
		}
	}()
	return l.Addr().String()
}

// A broker that restarts while nothing is to be published is found again without any event.
func TestBrokerRestartedWhileIdle(t *testing.T) {
	t.Parallel()
	mq := testenv.OwnRabbitMQ(t, testenv.Options{})
	o := outboxOn(t, testenv.Database(t), mq.URL)
	p := o.start(t, "FALLBACK_INTERVAL=1h")
	p.Ready(t)
	mq.Stop(t)
	p.NotReady(t)
	mq.Start(t)
	p.Ready(t)
	if n := p.Metric(t, "outbox_reconnects_total", `server="rabbitmq"`); n != 1 {
		t.Errorf("reconnects = %v, want 1", n)
	}
	q := testenv.Consume(t, o.amqpURL, exchange)
	o.insert(t, event{})
	q.Next(t, patience)
}

// Probes read memory: they answer while nothing moves on either link.
func TestProbesAnswerWhileBothLinksAreStalled(t *testing.T) {
	t.Parallel()
	o := newOutbox(t)
	database, broker := testenv.NewProxy(t, o.dsn), testenv.NewProxy(t, o.amqpURL)
	p := testenv.Start(t, "DATABASE_URL="+database.URL, "AMQP_URL="+broker.URL)
	p.Ready(t)
	database.Stall()
	broker.Stall()
	o.insert(t, event{})
	p.NotReady(t) // once the limits of both links have passed
	for _, path := range []string{"/livez", "/readyz", "/metrics"} {
		began := time.Now()
		if status, body := p.Get(t, path); path == "/livez" && status != http.StatusOK {
			t.Errorf("%s = %d %s", path, status, body)
		}
		if took := time.Since(began); took > 5*time.Second {
			t.Errorf("%s took %v", path, took)
		}
	}
	if code, out, _ := testenv.Command(t, []string{"HTTP_ADDR=" + p.HTTPAddr}, "healthcheck"); code != 0 {
		t.Errorf("healthcheck: exit code %d, %s", code, out)
	}
}
