package main

import (
	"context"
	"fmt"
	"strings"
	"time"

	sqlfiles "outbox-relay/sql"
)

// justConnected is how old a relay's session is at least when its links are judged.
const justConnected = 5 * time.Second

// checkState says what status shows, as far as something is wrong with it.
func (d *doctor) checkState(ctx context.Context, o *operator) {
	s := o.newStatus()
	if err := s.read(ctx, o, d.cfg.OnDeadLetter == onDeadLetterHold); err != nil {
		d.failed("relay", err)
		return
	}
	if s.Paused {
		d.warning("paused", "outbox-relay resume", "paused since %s by %s", s.since(*s.PausedSince), s.PausedBy)
	} else {
		d.ok("paused", "not paused")
	}
	d.checkRelays(s)
	switch w := s.Doorbell; {
	case w.OldestPID == 0 && w.SilentWriters > 0:
		d.fault("doorbell", "COMMIT PREPARED or ROLLBACK PREPARED; and SET LOCAL outbox.notify = 'off' in such transactions",
			"a prepared transaction that inserted events keeps the relay from falling asleep, see pg_prepared_xacts")
	case w.OldestAge != nil && *w.OldestAge > longWriter.Seconds():
		d.warning("doorbell", fmt.Sprintf(`psql -c "SELECT pg_terminate_backend(%d)" if it hangs`, w.OldestPID),
			"an open transaction that inserted events keeps the relay from falling asleep%s: %s", age(" for %s", w.OldestAge), w.oldestWho)
	default:
		d.ok("doorbell", "%s", s.doorbellLine())
	}
	switch {
	case s.OldestPending != nil && *s.OldestPending > lateEvent.Seconds():
		d.warning("backlog", "see the other findings, and `outbox-relay status`",
			"%s%s", s.Pending.of("pending event"), age(", the oldest for %s", s.OldestPending))
	default:
		d.ok("backlog", "%s%s", s.Pending.of("pending event"), age(", the oldest for %s", s.OldestPending))
	}
	if s.DeadLetters.N > 0 {
		d.warning("dead-letters", "outbox-relay dead-letters list", "%s given up", s.DeadLetters.of("event"))
	} else {
		d.ok("dead-letters", "no event was given up")
	}
	if s.HeldAggregates.N > 0 {
		d.warning("held", "outbox-relay status", "%s held back by a failed event", s.HeldAggregates.of("aggregate"))
	} else {
		d.ok("held", "no aggregate is held back by a failed event")
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
			if r.ordering() != d.cfg.Ordering {
				d.warning("relay", "set the same ORDERING for all relays of an outbox",
					"%s works with ORDERING=%s, and the settings here say ORDERING=%s: relays of the two kinds exclude each other, "+
						"one with these settings can only stand by", who, r.ordering(), d.cfg.Ordering)
			}
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

// returnedEvents is whether any pending or dead event was returned by the broker, for want of a queue.
type returnedEvents int

const (
	returnedUnknown returnedEvents = iota
	returnedNone
	returnedSome
)

// checkFailures says of what events fail.
func (d *doctor) checkFailures(ctx context.Context, o *operator) {
	rows, err := o.QueryContext(ctx, sqlfiles.Doctor("failures"), heldLook)
	if err != nil {
		d.failed("failures", err)
		return
	}
	defer rows.Close()
	found := false
	for ; rows.Next(); found = true {
		var outcome, example string
		var n, texts int64
		if err := rows.Scan(&outcome, &n, &texts, &example); err != nil {
			d.failed("failures", err)
			return
		}
		mend := "outbox-relay status"
		switch outcome {
		case Returned.String():
			d.returned, mend = returnedSome, "bind a queue for the routing key"
		case Nacked.String():
			mend = "see whether a queue is full"
		case Rejected.String():
			mend = "outbox-relay dead-letters list"
		}
		if texts > 1 {
			d.warning("failures", mend, "%s %s in %d different words, for example: %s",
				counted(n, "event"), outcome, texts, strings.TrimPrefix(example, outcome+": "))
			continue
		}
		d.warning("failures", mend, "%s %s", counted(n, "event"), example)
	}
	if err := rows.Err(); err != nil {
		d.failed("failures", err)
		return
	}
	if d.returned == returnedUnknown {
		d.returned = returnedNone
	}
	if !found {
		d.ok("failures", "no pending or dead event has failed")
	}
}
