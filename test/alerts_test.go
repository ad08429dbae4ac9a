package test

import (
	"encoding/json"
	"fmt"
	"net/http"
	"os"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	sqlfiles "outbox-relay/sql"

	"outbox-relay/internal/testenv"
)

// incident is an outbox with a relay of its own, about which an alert fires.
type incident struct {
	*proxied
	alert string
	page  string // of the runbook
	addr  string // of the relay's /metrics
	relay *testenv.Process
	env   []string
	ends  func()               // what repeat began
	ctl   func(args ...string) // rabbitmqctl, where the broker is its own
}

// run starts the incident's relay.
func (i *incident) run(t *testing.T) {
	t.Helper()
	i.relay = i.start(t, append([]string{"HTTP_ADDR=" + i.addr}, i.env...)...)
}

// types does what the page says: a command, with the relay's settings.
func (i *incident) types(t *testing.T, args ...string) (stdout string) {
	t.Helper()
	command := "outbox-relay " + strings.Join(args[:min(len(args), 2)], " ")
	if len(args) > 1 && strings.HasPrefix(args[1], "-") {
		command = "outbox-relay " + args[0]
	}
	i.says(t, command)
	code, stdout, stderr := testenv.Command(t, append([]string{"DATABASE_URL=" + i.dsn, "AMQP_URL=" + i.amqpURL}, i.env...), args...)
	if code != 0 {
		t.Fatalf("%s: exit code %d\n%s%s", command, code, stdout, stderr)
	}
	return stdout
}

// says fails the test unless the alert's page, or one that it sends to, has these words.
func (i *incident) says(t *testing.T, words string) {
	t.Helper()
	if !strings.Contains(i.page, words) {
		t.Errorf("the runbook's page does not say %q:\n%s", words, i.page)
	}
}

// terminates ends the session that a command has named.
func (i *incident) terminates(t *testing.T, pid string) {
	t.Helper()
	i.says(t, `psql -c "SELECT pg_terminate_backend(PID)"`)
	testenv.Exec(t, i.dsn, "SELECT pg_terminate_backend("+pid+")")
}

// incidents says how each alert comes about and what its page has somebody do.
var incidents = map[string]struct {
	env     []string
	provoke func(*testing.T, *incident)
	mend    func(*testing.T, *incident)
}{
	"OutboxRelayAbsent": {
		provoke: func(t *testing.T, i *incident) {
			i.run(t)
			i.relay.Ready(t)
			time.Sleep(3 * time.Second) // Prometheus is to have seen it
			i.relay.Kill(t)
		},
		mend: func(t *testing.T, i *incident) {
			if out := i.types(t, "status"); !strings.Contains(out, "no relay") {
				t.Errorf("status does not say that there is no relay:\n%s", out)
			}
			i.run(t)
		},
	},
	"OutboxNoActiveRelay": {
		provoke: func(t *testing.T, i *incident) {
			holder, err := testenv.DB(t, i.dsn).Conn(t.Context())
			if err != nil {
				t.Fatal(err)
			}
			_, err = holder.ExecContext(t.Context(), fmt.Sprintf(`SET application_name = 'somebody else';
				SELECT pg_advisory_lock(%d, 'outbox_events'::regclass::int)`, sqlfiles.WorkLockClass))
			if err != nil {
				t.Fatal(err)
			}
			i.run(t)
		},
		mend: func(t *testing.T, i *incident) {
			_, out, _ := i.operate(t, "doctor")
			named := regexp.MustCompile(`pg_terminate_backend\((\d+)\)`).FindStringSubmatch(out)
			if named == nil {
				t.Fatalf("doctor names no session in the way:\n%s", out)
			}
			i.terminates(t, named[1])
		},
	},
	"OutboxLinkDown": {
		provoke: func(t *testing.T, i *incident) {
			i.run(t)
			i.relay.Ready(t)
			i.broker.Refuse()
		},
		mend: func(t *testing.T, i *incident) {
			if reason := i.relay.NotReady(t); !strings.Contains(reason, "rabbitmq") {
				t.Errorf("readiness does not name the server: %s", reason)
			}
			i.says(t, "Mend the server, the network or the password")
			i.broker.Resume()
		},
	},
	"OutboxPaused": {
		provoke: func(t *testing.T, i *incident) {
			i.run(t)
			i.mustOperate(t, "pause", "--reason=a deploy")
		},
		mend: func(t *testing.T, i *incident) {
			if out := i.types(t, "status"); !strings.Contains(out, "a deploy") {
				t.Errorf("status does not say why it is paused:\n%s", out)
			}
			i.types(t, "resume")
		},
	},
	"OutboxBrokerBlocked": {
		provoke: func(t *testing.T, i *incident) {
			mq := testenv.OwnRabbitMQ(t, testenv.Options{})
			i.amqpURL, i.broker = mq.URL, testenv.NewProxy(t, mq.URL)
			i.run(t)
			i.relay.Ready(t)
			mq.Ctl(t, "set_vm_memory_high_watermark", "0.0001")
			i.insert(t, event{}) // only connections that publish are told
			i.ctl = func(args ...string) { mq.Ctl(t, args...) }
		},
		mend: func(t *testing.T, i *incident) {
			i.says(t, "rabbitmqctl set_vm_memory_high_watermark\n0.6")
			i.ctl("set_vm_memory_high_watermark", "0.6")
		},
	},
	"OutboxBacklogHigh": {
		provoke: func(t *testing.T, i *incident) {
			i.mustOperate(t, "pause")
			i.insertMany(t, 1500, 100, "order.created")
			i.run(t)
		},
		mend: func(t *testing.T, i *incident) { i.types(t, "resume") },
	},
	"OutboxBacklogGrowing": {
		provoke: func(t *testing.T, i *incident) {
			i.mustOperate(t, "pause")
			i.insertMany(t, 200, 100, "order.created")
			i.run(t)
			i.repeat(t, time.Second, func() {
				_, _ = i.db.Exec(`INSERT INTO outbox_events (aggregate_type, aggregate_id, event_type, payload)
					SELECT 'bulk', n::text, 'order.created', '{}' FROM generate_series(1, 100) n`)
			})
		},
		mend: func(t *testing.T, i *incident) {
			i.says(t, "If one writer runs a bulk job, let it end")
			i.stop()
			i.mustOperate(t, "resume")
		},
	},
	"OutboxOldestEventTooOld": {
		env: []string{"RETRY_MAX=1s"},
		provoke: func(t *testing.T, i *incident) {
			i.run(t)
			testenv.Exec(t, i.dsn, `INSERT INTO outbox_events (aggregate_type, aggregate_id, event_type, payload, created_at)
				VALUES ('order', '1', 'nobody.listens', '{}', now() - interval '10 minutes')`)
		},
		mend: bindQueue,
	},
	"OutboxAggregatesHeld": {
		env: []string{"MAX_ATTEMPTS=1", "ON_DEAD_LETTER=hold"},
		provoke: func(t *testing.T, i *incident) {
			i.run(t)
			i.insert(t, event{eventType: "nobody.listens"}, event{})
		},
		mend: func(t *testing.T, i *incident) {
			dead := testenv.Value[string](t, i.dsn, "SELECT id FROM outbox_events WHERE dead_at IS NOT NULL")
			if out := i.types(t, "status"); !strings.Contains(out, "NO_ROUTE") {
				t.Errorf("status does not say why the aggregate is held back:\n%s", out)
			}
			i.types(t, "dead-letters", "show", dead)
			i.types(t, "dead-letters", "discard", dead)
		},
	},
	"OutboxDeadLetters": {
		env: []string{"MAX_ATTEMPTS=1"},
		provoke: func(t *testing.T, i *incident) {
			i.run(t)
			i.insert(t, event{eventType: "nobody.listens"}, event{eventType: "nobody.listens"})
		},
		mend: func(t *testing.T, i *incident) {
			testenv.Consume(t, i.amqpURL, exchange, "nobody.#")
			i.types(t, "dead-letters", "list")
			i.types(t, "dead-letters", "retry", "--error=NO_ROUTE", "--yes")
		},
	},
	"OutboxBatchSlow": {
		env: []string{"CONFIRM_TIMEOUT=60s", "SHUTDOWN_TIMEOUT=90s"},
		provoke: func(t *testing.T, i *incident) {
			i.run(t)
			i.relay.Ready(t)
			i.broker.Delay(4 * time.Second) // each way
			i.repeat(t, time.Second, func() {
				_, _ = i.db.Exec(`INSERT INTO outbox_events (aggregate_type, aggregate_id, event_type, payload)
					SELECT 'order', n::text, 'order.created', '{}' FROM generate_series(1, 5) n`)
			})
		},
		mend: func(_ *testing.T, i *incident) { i.broker.Resume() },
	},
	"OutboxListenNotWorking": {
		provoke: func(t *testing.T, i *incident) {
			i.repeat(t, 0, func() {
				_, _ = i.db.Exec(`SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = current_database()
					AND application_name LIKE 'outbox-relay%' AND query LIKE 'LISTEN%'`)
			})
			i.run(t)
			i.relay.WaitLog(t, patience, "notifications do not arrive")
		},
		mend: func(t *testing.T, i *incident) {
			i.stop()
			i.says(t, "restart the relay")
			i.relay.Stop(t)
			i.run(t)
		},
	},
	"OutboxSleepRefused": {
		provoke: func(t *testing.T, i *incident) {
			forgotten := testenv.Begin(t, i.db, `INSERT INTO outbox_events (aggregate_type, aggregate_id, event_type, payload)
				VALUES ('order', '1', 'order.created', '{}')`)
			t.Cleanup(func() { _ = forgotten.Rollback() })
			i.run(t)
		},
		mend: func(t *testing.T, i *incident) {
			var status struct {
				Doorbell struct {
					PID int `json:"oldest_silent_writer_pid"`
				}
			}
			if err := json.Unmarshal([]byte(i.types(t, "status", "--json")), &status); err != nil || status.Doorbell.PID == 0 {
				t.Fatalf("status names no writer: %v", err)
			}
			i.terminates(t, strconv.Itoa(status.Doorbell.PID))
		},
	},
}

// bindQueue is the mend for events that nobody's queue takes.
func bindQueue(t *testing.T, i *incident) {
	i.says(t, "bind one")
	testenv.Consume(t, i.amqpURL, exchange, "nobody.#")
}

// Each alert of deploy/prometheus fires when its trouble comes about, and ends after what its page of the
// runbook has somebody type. Prometheus runs the very rules, only with shorter times.
func TestEachAlertIsProvokedAndMendedByItsPage(t *testing.T) {
	t.Parallel()
	all := make(map[string]*incident)
	var targets strings.Builder
	pages := runbookPages(t)
	for alert, c := range incidents {
		i := &incident{proxied: newProxied(t), alert: alert, page: pages[alert], addr: "127.0.0.1:" + strconv.Itoa(testenv.FreePort(t)), env: c.env}
		if i.page == "" {
			t.Errorf("docs/runbook.md has no page for %s", alert)
		}
		testenv.Consume(t, i.amqpURL, exchange, "order.#")
		all[alert] = i
		fmt.Fprintf(&targets, "  - {job_name: %s, static_configs: [{targets: ['%s']}]}\n", alert, i.addr)
	}
	dir := t.TempDir()
	rules := hurriedRules(t)
	for _, name := range regexp.MustCompile(`alert: (\w+)`).FindAllStringSubmatch(rules, -1) {
		if all[name[1]] == nil {
			t.Errorf("%s is not provoked here", name[1])
		}
	}
	config := "global: {scrape_interval: 1s, scrape_timeout: 1s, evaluation_interval: 1s}\nrule_files: [alerts.yml]\nscrape_configs:\n" + targets.String()
	for name, text := range map[string]string{"alerts.yml": rules, "prometheus.yml": config} {
		if err := os.WriteFile(filepath.Join(dir, name), []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	prometheus := testenv.Prometheus(t, dir)
	for alert, c := range incidents {
		t.Run(alert, func(t *testing.T) {
			t.Parallel()
			i := all[alert]
			c.provoke(t, i)
			testenv.Eventually(t, 2*time.Minute, alert+" fires", func() bool { return firing(t, prometheus, alert) })
			c.mend(t, i)
			testenv.Eventually(t, 2*time.Minute, alert+" ends", func() bool { return !firing(t, prometheus, alert) })
			i.stop()
			i.relay.Ready(t)
		})
	}
}

// hurriedRules are the alerts of deploy/prometheus that need not hold for minutes before they fire.
func hurriedRules(t *testing.T) string {
	t.Helper()
	text, err := os.ReadFile("../deploy/prometheus/alerts.yml")
	if err != nil {
		t.Fatal(err)
	}
	rules := regexp.MustCompile(`(?m)^ +for: .*\n`).ReplaceAllString(string(text), "")
	return strings.NewReplacer("[15m]", "[15s]", "[5m]", "[30s]", "_refused_seconds) > 600", "_refused_seconds) > 2").Replace(rules)
}

// firing reports whether an alert fires for the job of its own name.
func firing(t *testing.T, prometheus, alert string) bool {
	t.Helper()
	resp, err := http.Get(prometheus + "/api/v1/alerts")
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	var answer struct {
		Data struct {
			Alerts []struct {
				State  string
				Labels struct{ Alertname, Job string }
			}
		}
	}
	if err := json.NewDecoder(resp.Body).Decode(&answer); err != nil {
		t.Fatal(err)
	}
	for _, a := range answer.Data.Alerts {
		if a.Labels.Alertname == alert && a.Labels.Job == alert && a.State == "firing" {
			return true
		}
	}
	return false
}

// runbookPages returns each alert's page, with the pages that it sends to.
func runbookPages(t *testing.T) map[string]string {
	t.Helper()
	text, err := os.ReadFile("../docs/runbook.md")
	if err != nil {
		t.Fatal(err)
	}
	parts := strings.Split(string(text), "\n## ")
	pages := make(map[string]string)
	for _, part := range parts[1:] {
		name, page, _ := strings.Cut(part, "\n")
		pages[name] = parts[0] + page // what comes first, whatever the alert
	}
	whole := make(map[string]string)
	for name, page := range pages {
		whole[name] = page
		for _, link := range regexp.MustCompile(`\[(Outbox\w+)\]`).FindAllStringSubmatch(page, -1) {
			whole[name] += pages[link[1]]
		}
	}
	return whole
}

// repeat does something every interval until stop.
func (i *incident) repeat(t *testing.T, interval time.Duration, do func()) {
	stop := make(chan struct{})
	var wg sync.WaitGroup
	wg.Go(func() {
		for {
			do()
			select {
			case <-stop:
				return
			case <-time.After(interval):
			}
		}
	})
	i.ends = sync.OnceFunc(func() {
		close(stop)
		wg.Wait()
	})
	t.Cleanup(i.ends)
}

// stop ends what repeat began.
func (i *incident) stop() {
	if i.ends != nil {
		i.ends()
	}
}
