package main

import (
	"context"
	"fmt"
	"time"

	sqlfiles "outbox-relay/sql"
)

// justConnected is how old a relay's session is at least when its links are judged.
const justConnected = 5 * time.Second

// checkState says what status shows, as far as something is wrong with it.
func (d *doctor) checkState(ctx context.Context, o *operator) {
	s, err := o.look(ctx, d.cfg)
	if err != nil {
		d.failed("state", err)
		return
	}
	if s.Paused {
		d.warning("paused", "outbox-relay resume", "paused since %s by %s", s.since(*s.PausedSince), s.PausedBy)
	}
	d.checkRelays(s)
	if w := s.Doorbell; w.OldestPID == 0 && w.SilentWriters > 0 {
		d.fault("doorbell", "COMMIT PREPARED or ROLLBACK PREPARED; and SET LOCAL outbox.notify = 'off' in such transactions",
			"a prepared transaction that inserted events keeps the relay from falling asleep, see pg_prepared_xacts")
	} else if w.OldestAge != nil && *w.OldestAge > longWriter.Seconds() {
		d.warning("doorbell", fmt.Sprintf(`psql -c "SELECT pg_terminate_backend(%d)" if it hangs`, w.OldestPID),
			"an open transaction that inserted events keeps the relay from falling asleep%s: %s", age(" for %s", w.OldestAge), w.oldestWho)
	}
	switch {
	case s.OldestPending != nil && *s.OldestPending > lateEvent.Seconds():
		d.warning("backlog", "see the other findings, and `outbox-relay status`",
			"%s events are pending%s", s.Pending, age(", the oldest for %s", s.OldestPending))
	default:
		d.ok("backlog", "%s events are pending%s", s.Pending, age(", the oldest for %s", s.OldestPending))
	}
	if s.DeadLetters.N > 0 {
		d.warning("dead-letters", "outbox-relay dead-letters list", "%s events were given up", s.DeadLetters)
	}
	if s.HeldAggregates.N > 0 {
		d.warning("held", "outbox-relay status", "%s aggregates are held back by a failed event", s.HeldAggregates)
	}
	d.checkFailures(ctx, o)
}

func (d *doctor) checkRelays(s *Status) {
	works, standsBy := 0, 0
	for _, r := range s.Relays {
		who, how := s.relayLines(r)
		switch {
		case !r.Relay && r.Works:
			d.fault("relay", fmt.Sprintf(`psql -c "SELECT pg_terminate_backend(%d)"`, r.PID), "%s: %s", who, how)
			continue
		case !r.Relay:
			d.warning("relay", fmt.Sprintf(`psql -c "SELECT pg_terminate_backend(%d)"`, r.PID), "%s: %s", who, how)
			continue
		case r.Works:
			works++
		default:
			standsBy++
		}
		switch {
		case !r.Broker && r.Since != nil && s.At.Sub(*r.Since) < justConnected:
			d.ok("relay", "%s: %s, %s; it has only just connected", r.role(), who, how)
		case !r.Broker && s.LastErrorAt != nil:
			d.fault("relay", "see the findings on rabbitmq", "%s: %s; last error, %s: %s", who, how, s.since(*s.LastErrorAt), s.LastError)
		case !r.Broker:
			d.fault("relay", "see the findings on rabbitmq", "%s: %s", who, how)
		case r.Works && !r.Listening && r.Since != nil && s.At.Sub(*r.Since) > time.Minute:
			d.fault("relay", "see the finding on listen", "%s: %s: events wait for the fallback poll", who, how)
		default:
			d.ok("relay", "%s: %s, %s", r.role(), who, how)
		}
	}
	switch {
	case works == 0:
		d.fault("relay", "outbox-relay run", "no relay works: nothing is published")
	case standsBy == 0 && works == 1:
		d.warning("relay", "run a second copy", "no relay stands by: while this one is down, nothing is published")
	}
}

// checkFailures says of what events fail.
func (d *doctor) checkFailures(ctx context.Context, o *operator) {
	rows, err := o.QueryContext(ctx, sqlfiles.Doctor("failures"), heldLook)
	if err != nil {
		d.failed("failures", err)
		return
	}
	defer rows.Close()
	for rows.Next() {
		var outcome, example string
		var n int64
		if err := rows.Scan(&outcome, &n, &example); err != nil {
			d.failed("failures", err)
			return
		}
		mend := "outbox-relay status"
		switch outcome {
		case Returned.String():
			mend = "bind a queue for the routing key"
		case Nacked.String():
			mend = "see whether a queue is full"
		}
		d.warning("failures", mend, "%d events: %s", n, example)
	}
	if err := rows.Err(); err != nil {
		d.failed("failures", err)
	}
}
