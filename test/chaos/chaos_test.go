package chaos

import (
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"outbox-relay/internal/loadtest"
	"outbox-relay/internal/testenv"
)

const (
	// batch is the relays' BATCH_SIZE: small, so that a backlog takes many batches. A relay has a
	// batch and the half of the one before in hand at most.
	batch, inHand = 100, batch + batch/2
	// recoverWithin is how long after a fault's end an event may take to be delivered before the
	// relays count as stuck. Much more than it takes, since the machine may be busy.
	recoverWithin = 90 * time.Second
	// patience is how long the last events may stay away once no more come.
	patience = 30 * time.Second
)

// chaos is what is broken and those who see to it.
type chaos struct {
	t    *testing.T
	seed uint64
	rng  *rand.Rand
	// ordering is the relays' ORDERING. Ordered, one works and one stands by; else both work.
	ordering string

	postgres *testenv.Postgres
	rabbitmq *testenv.RabbitMQ
	relays   [2]*relay
	load     *loadtest.Load
	consumer *loadtest.Consumer
	oracle   *loadtest.Oracle

	began   time.Time
	tallies []*tally
	rounds  int
	killed  time.Time // a relay died: the next ones may suspect events for a minute
	stuck   bool      // no use to go on
}

func newChaos(t *testing.T, seed uint64, ordering string, length time.Duration) *chaos {
	t.Helper()
	c := &chaos{t: t, seed: seed, ordering: ordering, rng: rand.New(rand.NewPCG(seed, 0)), began: time.Now()}
	c.say("seed %d, ORDERING=%s", seed, ordering)
	o := testenv.Options{Lifetime: length + 30*time.Minute}
	c.postgres = testenv.OwnPostgres(t, o)
	c.rabbitmq = testenv.OwnRabbitMQ(t, o)
	t.Cleanup(c.keepLogs)
	code, stdout, stderr := testenv.Command(t, []string{"DATABASE_URL=" + c.postgres.DSN}, "migrate")
	if code != 0 {
		t.Fatalf("migrate: exit code %d\n%s%s", code, stdout, stderr)
	}
	c.consumer = loadtest.Consume(t, c.rabbitmq.URL, "outbox")
	c.oracle = loadtest.NewOracle(t, c.postgres.DSN, c.consumer)
	for i := range c.relays {
		c.relays[i] = newRelay(c, string(rune('A'+i)))
	}
	c.load = loadtest.Start(t, loadtest.Config{
		DSN: c.postgres.DSN, Writers: 4, LateWriters: 2, Aggregates: 40, Pause: 15 * time.Millisecond,
	})
	c.check("no fault", nil, 0)
	return c
}

// round lets the faults happen at once and sees whether everything recovers.
func (c *chaos) round(faults ...fault) {
	c.t.Helper()
	c.rounds++
	names := make([]string, len(faults))
	copies := 0
	for i, f := range faults {
		names[i] = f.name
		copies += f.copies * inHand
	}
	name := strings.Join(names, " + ")
	if len(faults) > 1 {
		copies *= 2 // each may break what the other has left of a session
	}
	if !c.ordered() {
		copies *= 2 // both relays have a batch in hand
	}
	tl := c.tally(name, len(faults) > 1)
	time.Sleep(c.between(300*time.Millisecond, 1500*time.Millisecond))

	alone := len(faults) == 1
	var over time.Time
	var ends []func()
	for _, f := range faults {
		end := f.begin(c, alone)
		over = time.Now()
		if end != nil {
			ends = append(ends, end)
		}
		if len(faults) > 1 {
			time.Sleep(c.between(0, 2*time.Second))
		}
	}
	for i := len(ends) - 1; i >= 0; i-- {
		ends[i]()
		if !alone || !faults[0].fromBegin {
			over = time.Now()
		}
	}
	next, caughtUp, ok := c.await(over, recoverWithin)
	if !ok {
		c.violation("%s: no event committed since its end was delivered within %v", name, recoverWithin)
		c.stuck = true
		return
	}
	tl.next, tl.caughtUp = append(tl.next, next), append(tl.caughtUp, caughtUp)
	time.Sleep(c.between(200*time.Millisecond, time.Second))
	c.check(name, tl, copies)
}

func (c *chaos) ordered() bool { return c.ordering == "aggregate" }

// await waits until an event is delivered whose commit was asked for after over. It returns the
// times from over to the first delivery of any event, and of such a one.
func (c *chaos) await(over time.Time, within time.Duration) (next, caughtUp time.Duration, ok bool) {
	looked := c.consumer.Count()
	for looked > 0 && c.consumer.Received(looked - 1)[0].At.After(over) {
		looked-- // some came meanwhile
	}
	for time.Since(over) < within {
		for _, d := range c.consumer.Received(looked) {
			looked++
			if !d.At.After(over) {
				continue
			}
			if next == 0 {
				next = d.At.Sub(over)
			}
			if asked, ok := c.load.Asked(d.ID); ok && asked.After(over) {
				return next, d.At.Sub(over), true
			}
		}
		time.Sleep(2 * time.Millisecond)
	}
	return next, 0, false
}

// check holds the load, asks the oracle, and looks at the relays. At most copies events may have
// been delivered twice.
func (c *chaos) check(name string, tl *tally, copies int) {
	c.t.Helper()
	c.load.Hold()
	defer c.load.Release()
	v, err := c.oracle.Check(c.t.Context(), patience)
	if err != nil {
		c.violation("%s: %v", name, err)
		c.stuck = true
		return
	}
	c.load.Forget()
	if !c.ordered() {
		v.Disordered = nil
	}
	for _, fault := range v.Faults() {
		c.violation("%s: %s", name, fault)
	}
	if v.Duplicated > copies {
		c.violation("%s: %d events were delivered twice, want at most %d", name, v.Duplicated, copies)
	}
	c.stuck = c.stuck || len(v.Lost) > 0
	for _, r := range c.relays {
		r.check(name)
	}
	if tl == nil {
		return
	}
	tl.add(v)
	c.say("%3d  %-50s %5d events, %4d twice, next after %v, caught up after %v", c.rounds, name,
		v.Events, v.Duplicated, round(tl.next[len(tl.next)-1]), round(tl.caughtUp[len(tl.caughtUp)-1]))
}

// finish ends the load and prints the table.
func (c *chaos) finish() {
	c.t.Helper()
	c.load.Stop()
	c.report()
}

// violation is something that must never be.
func (c *chaos) violation(format string, args ...any) {
	c.t.Helper()
	text := fmt.Sprintf(format, args...)
	c.say("VIOLATION in round %d: %s", c.rounds, text)
	c.t.Errorf("seed %d, round %d, %v after the start: %s", c.seed, c.rounds, time.Since(c.began).Round(time.Millisecond), text)
}

// say prints at once; the test's own log appears at its end.
func (c *chaos) say(format string, args ...any) {
	if testing.Verbose() {
		fmt.Printf("%s  %s\n", time.Now().UTC().Format("15:04:05.000"), fmt.Sprintf(format, args...))
	}
}

// between draws a duration.
func (c *chaos) between(low, high time.Duration) time.Duration {
	return low + time.Duration(c.rng.Int64N(int64(high-low)+1))
}

// keepLogs writes down what relays and servers said, if something was wrong.
func (c *chaos) keepLogs() {
	if !c.t.Failed() {
		return
	}
	dir := os.Getenv("CHAOS_LOGS")
	var err error
	if dir == "" {
		dir, err = os.MkdirTemp("", "outbox-relay-chaos-")
	} else {
		err = os.MkdirAll(dir, 0o755)
	}
	if err != nil {
		c.t.Errorf("keep the logs: %v", err)
		return
	}
	logs := map[string]string{"postgres.log": c.postgres.Logs(), "rabbitmq.log": c.rabbitmq.Logs()}
	for _, r := range c.relays {
		if r == nil {
			continue
		}
		for i, p := range r.processes {
			logs[fmt.Sprintf("relay-%s-%d.log", r.name, i+1)] = p.Logs()
		}
	}
	for name, text := range logs {
		if err := os.WriteFile(filepath.Join(dir, name), []byte(text), 0o644); err != nil {
			c.t.Errorf("keep the logs: %v", err)
		}
	}
	c.t.Logf("logs are kept in %s", dir)
}
