package main

import (
	"fmt"
	"time"
)

// Event is one row of outbox_events, as claimed. It is never changed after the claim, so it
// may be read by several goroutines.
type Event struct {
	ID            string // the row's UUID in its canonical form; becomes the message-id
	Seq           int64  // position in the outbox; 0 for rows older than the column
	AggregateType string
	AggregateID   string
	EventType     string
	Payload       []byte    // the column's bytes, untouched; nil when Oversized
	PayloadBytes  int       // length of the column's bytes, also when Oversized
	Oversized     bool      // over AMQP_MAX_MESSAGE_BYTES: not loaded
	ContentType   string    // what the column's type implies; a header may overrule it
	Headers       []byte    // the headers column as JSON text; nil when NULL
	Attempts      int       // failures counted so far; 0 on the first delivery
	CreatedAt     time.Time // zero when the column does not hold a finite time
	Isolate       bool      // its last failure closed a channel: publish it alone
	Retried       bool      // it failed before, so later events of its aggregate were passed over
}

// Aggregate names what an event belongs to. Events of one aggregate are kept in order.
type Aggregate struct{ Type, ID string }

// Aggregate returns the aggregate the event belongs to.
func (e *Event) Aggregate() Aggregate { return Aggregate{e.AggregateType, e.AggregateID} }

// Outcome says what became of an event. It is also the value of a metric's label, so the set
// is closed.
type Outcome int

const (
	// Confirmed: the broker took responsibility for the message and did not return it.
	Confirmed Outcome = iota
	// Returned: a mandatory message had no queue to go to. Counts an attempt.
	Returned
	// Nacked: the broker refused this message, a full queue say. Counts an attempt.
	Nacked
	// Rejected: failed our own check, or the broker closed the channel because of it. Counts an attempt.
	Rejected
	// Late: no confirm in time while others of the session were confirmed. Counts nothing; a
	// late confirm still marks the event.
	Late
	// Unknown: the session was lost before a confirm came. Counts nothing; the event is sent again.
	Unknown
	// Released: never written to the broker. Counts nothing.
	Released
)

var outcomeNames = [...]string{"confirmed", "returned", "nacked", "rejected", "late", "unknown", "released"}

func (o Outcome) String() string {
	if o < 0 || int(o) >= len(outcomeNames) {
		return fmt.Sprintf("outcome(%d)", int(o))
	}
	return outcomeNames[o]
}

// CountsAttempt reports whether the outcome is a failure of the event itself, as opposed to one
// of the link or the broker.
func (o Outcome) CountsAttempt() bool { return o == Returned || o == Nacked || o == Rejected }

// Result is the outcome of one event.
type Result struct {
	Event   *Event
	Outcome Outcome
	Reason  string // for every outcome but Confirmed; ends up in last_error when an attempt counts
	// Final: can never succeed as the row stands, so further attempts are pointless. Only with Rejected.
	Final bool
}
