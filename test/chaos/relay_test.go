package chaos

import (
	"fmt"
	"strings"
	"syscall"
	"time"

	"outbox-relay/internal/testenv"
)

const (
	// spareGoroutines and spareFiles are how many more a relay may have after faults than before:
	// a reconnect or a count of the backlog may be under way.
	spareGoroutines, spareFiles = 8, 5
	// maxLines bounds what a relay logs in one round.
	maxLines = 80
	// suspicionLasts is how long relays may suspect events after one died: a minute of work, which
	// outages begin anew.
	suspicionLasts = 5 * time.Minute
)

// relay is one of the two: its present process and its links, which are its alone.
type relay struct {
	c                  *chaos
	name               string
	postgres, rabbitmq *testenv.Proxy
	processes          []*testenv.Process // the last one is the present
	frozen             bool
	logged             int     // bytes of the present process's log at the last check
	goroutines, files  float64 // at the first check of the present process
}

func newRelay(c *chaos, name string) *relay {
	c.t.Helper()
	r := &relay{
		c: c, name: name,
		postgres: testenv.NewProxy(c.t, c.postgres.DSN), rabbitmq: testenv.NewProxy(c.t, c.rabbitmq.URL),
	}
	r.start()
	r.process().Ready(c.t)
	return r
}

func (r *relay) start() {
	r.c.t.Helper()
	r.processes = append(r.processes, testenv.Start(r.c.t,
		"DATABASE_URL="+r.postgres.URL, "AMQP_URL="+r.rabbitmq.URL, "ORDERING="+r.c.ordering, fmt.Sprintf("BATCH_SIZE=%d", batch)))
	r.logged, r.goroutines, r.files = 0, 0, 0
}

func (r *relay) process() *testenv.Process { return r.processes[len(r.processes)-1] }

// leads reports whether the relay thinks that it does.
func (r *relay) leads() bool {
	return !r.frozen && r.process().Running() && r.process().Metric(r.c.t, "outbox_leader") == 1
}

func (r *relay) signal(sig syscall.Signal) {
	r.c.t.Helper()
	r.process().Signal(r.c.t, sig)
	switch sig {
	case syscall.SIGSTOP:
		r.frozen = true
	case syscall.SIGCONT:
		r.frozen = false
	}
}

// active is the relay that works, and the other one. Between two rounds there is one.
func (c *chaos) active() (works, standsBy *relay) {
	c.t.Helper()
	for deadline := time.Now().Add(10 * time.Second); time.Now().Before(deadline); time.Sleep(10 * time.Millisecond) {
		for i, r := range c.relays {
			if r.leads() {
				return r, c.relays[1-i]
			}
		}
	}
	return c.relays[0], c.relays[1] // in a pair, the other fault may keep both from it
}

// check looks for what only grows: goroutines, open files, the log. The relay has nothing to do.
func (r *relay) check(fault string) {
	r.c.t.Helper()
	p := r.process()
	if !p.Running() {
		r.c.violation("%s: relay %s has ended", fault, r.name)
		return
	}
	news := p.Logs()[r.logged:]
	r.logged += len(news)
	if lines := strings.Count(news, "\n"); lines > maxLines {
		r.c.violation("%s: relay %s logged %d lines, want at most %d", fault, r.name, lines, maxLines)
	}
	if strings.Contains(news, "several relays died") && time.Since(r.c.killed) > suspicionLasts {
		r.c.violation("%s: relay %s suspects events although no relay has died", fault, r.name)
	}

	for deadline := time.Now().Add(20 * time.Second); ; time.Sleep(50 * time.Millisecond) {
		goroutines, files := p.Metric(r.c.t, "go_goroutines"), p.Metric(r.c.t, "process_open_fds")
		if r.goroutines == 0 {
			r.goroutines, r.files = goroutines, files
		}
		if goroutines <= r.goroutines+spareGoroutines && files <= r.files+spareFiles {
			return
		}
		if time.Now().After(deadline) {
			r.c.violation("%s: relay %s has %v goroutines and %v open files, had %v and %v", fault, r.name,
				goroutines, files, r.goroutines, r.files)
			return
		}
	}
}
