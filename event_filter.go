package main

import (
	"errors"
	"fmt"
	"reflect"
	"regexp"
	"strings"
	"time"

	"github.com/lib/pq"
)

// eventFilter says which events a command of a person is about, by flags that are the same in all of
// them. The zero value asks for nothing.
type eventFilter struct {
	IDs           []eventID `arg:"" optional:"" name:"id" help:"Ids of events; without any, all that the flags match."`
	EventType     term      `name:"event-type" placeholder:"TEXT" help:"Only events of this type."`
	AggregateType term      `name:"aggregate-type" placeholder:"TEXT" help:"Only events of aggregates of this type."`
	AggregateID   term      `name:"aggregate-id" placeholder:"TEXT" help:"Only events of the aggregate with this id."`
}

// args are the filter's parameters of a statement, NULL for what it does not ask for.
func (f eventFilter) args() []any {
	var ids any
	if len(f.IDs) > 0 {
		ids = pq.Array(f.IDs)
	}
	return []any{ids, orNull(f.EventType), orNull(f.AggregateType), orNull(f.AggregateID)}
}

// attrs are the filter's attributes of a log line: those that ask for something.
func (f eventFilter) attrs() []any {
	var attrs []any
	if len(f.IDs) > 0 {
		attrs = append(attrs, "ids_given", len(f.IDs))
	}
	attrs = appendSet(attrs, keyEventType, f.EventType)
	attrs = appendSet(attrs, "aggregate_type", f.AggregateType)
	return appendSet(attrs, keyAggregateID, f.AggregateID)
}

func appendSet(attrs []any, key string, value term) []any {
	if value == "" {
		return attrs
	}
	return append(attrs, key, string(value))
}

func orNull(t term) any {
	if t == "" {
		return nil
	}
	return string(t)
}

// term is a text that events must have. It cannot be given as empty: a script's variable that is
// not set must not mean all events.
type term string

func setTerm(target reflect.Value, text string) (wanted string) {
	if text == "" {
		return "a text to look for"
	}
	target.SetString(text)
	return ""
}

// eventID is the id of an event as a person gave it, in its canonical form.
type eventID string

var uuid = regexp.MustCompile(`^[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}$`)

func setEventID(target reflect.Value, text string) (wanted string) {
	text = strings.ToLower(text)
	if !uuid.MatchString(text) {
		return "the id of an event, like 0193a0f0-5bd1-7c3e-9d0a-2b1f4c5d6e7f"
	}
	target.SetString(text)
	return ""
}

// moment is a point in time as a person gave it: when it was, or how long ago. The zero value is none.
type moment struct {
	at  time.Time
	ago time.Duration
}

func setMoment(target reflect.Value, text string) (wanted string) {
	var m moment
	var err error
	if m.ago, err = time.ParseDuration(text); err != nil || m.ago <= 0 {
		if m.at, err = time.Parse(time.RFC3339, text); err != nil {
			return "a time like 2026-01-31T14:00:00Z, or how long ago, like 90m or 48h"
		}
	}
	target.Set(reflect.ValueOf(m))
	return ""
}

// before returns the point in time as a parameter of a statement, NULL for none. now is the time
// on the server's clock, by which events are marked.
func (m moment) before(now time.Time) any {
	switch {
	case m.ago > 0:
		return now.Add(-m.ago)
	case !m.at.IsZero():
		return m.at
	}
	return nil
}

// text is the moment as it was given, "" for none.
func (m moment) text() term {
	switch {
	case m.ago > 0:
		return term(m.ago.String() + " ago")
	case !m.at.IsZero():
		return term(m.at.Format(time.RFC3339))
	}
	return ""
}

// errUnconfirmed: a command would touch more than one event and was not told that this is meant.
var errUnconfirmed = errors.New("nothing was done: repeat the command with --yes to go ahead")

// checked is a command that has more to check in its flags than their form.
type checked interface{ faults() []fault }

// spanFault checks that a span of time has a length.
func spanFault(since, until moment) []fault {
	now := time.Now()
	from, isFrom := since.before(now).(time.Time)
	to, isTo := until.before(now).(time.Time)
	if isFrom && isTo && !from.Before(to) {
		return []fault{{"--until", fmt.Sprintf("%s is not after --since, %s", until.text(), since.text())}}
	}
	return nil
}

// rateFault checks a number of events a second.
func rateFault(rate int) []fault {
	const most = 100_000
	if rate < 1 || rate > most {
		return []fault{{"--rate", fmt.Sprintf("%d is not from 1 to %d", rate, most)}}
	}
	return nil
}

// pace returns how long to wait so that n events since began are no more than rate a second.
func pace(began time.Time, n, rate int) time.Duration {
	return time.Duration(n)*time.Second/time.Duration(rate) - time.Since(began)
}
