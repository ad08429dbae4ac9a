package main

import (
	"fmt"
	"math"
	"strings"
	"time"
)

// String is the status as a table for people.
func (s *Status) String() string {
	var b strings.Builder
	line := func(label, format string, args ...any) {
		fmt.Fprintf(&b, "%-15s %s\n", label, fmt.Sprintf(format, args...))
	}
	line("outbox", "schema %s of database %s, PostgreSQL %s, at %s", s.Schema, s.Database, s.ServerVersion, clock(s.At))
	if s.Paused {
		line("paused", "since %s by %s", s.since(*s.PausedSince), s.PausedBy)
	}
	works := 0
	for _, r := range s.Relays {
		who, how := s.relayLines(r)
		line(r.role(), "%s", who)
		line("", "%s", how)
		if r.Works {
			works++
		}
	}
	if works == 0 {
		text := "none: nothing is published"
		if s.Leader.Name != "" {
			text += "; last was " + s.Leader.Name + map[bool]string{true: ", which ended in order", false: ", which did not end in order"}[s.Leader.Clean]
		}
		line("relay", "%s", text)
	}
	line("doorbell", "%s", s.doorbellLine())
	line("pending", "%s%s", s.Pending, age(", oldest %s", s.OldestPending))
	retry := ""
	if s.NextRetry != nil {
		retry = ", next retry " + inTime(s.NextRetry.Sub(s.At))
	}
	line("in backoff", "%s%s", s.InBackoff, retry)
	line("dead letters", "%s", s.DeadLetters)
	line("rates", "in %s/s, out %s/s", rounded(s.RateIn), rounded(s.RateOut))
	if s.LastErrorAt != nil {
		line("last error", "%s, %s", s.since(*s.LastErrorAt), s.LastError)
	}
	if s.HeldAggregates.N > 0 {
		line("held back", "%s, by a failed event each; first those with the most events waiting", s.HeldAggregates.of("aggregate"))
	}
	for _, h := range s.Held {
		state := fmt.Sprintf("%s since %s", counted(h.Attempts, "attempt"), s.since(h.Since))
		switch {
		case h.Dead:
			state = "a dead letter since " + s.since(h.Since)
		case h.RetryAt != nil:
			state += ", next retry " + inTime(h.RetryAt.Sub(s.At))
		}
		line("", "%s %s: %s waiting behind %s %s", h.AggregateType, h.AggregateID, h.Waiting, h.EventType, h.EventID)
		line("", "  %s: %s", state, oneLine(h.LastError))
	}
	return b.String()
}

// role is what a session is to the outbox.
func (r RelayStatus) role() string {
	switch {
	case r.Works && r.Relay:
		return "works"
	case r.Relay:
		return "stands by"
	}
	return "in the way"
}

// relayLines say who a session is and how it is.
func (s *Status) relayLines(r RelayStatus) (who, how string) {
	who = fmt.Sprintf("pid %d, user %s, application_name %q", r.PID, r.User, r.ApplicationName)
	if r.Address != "" {
		who += ", from " + r.Address
	}
	if r.Works && r.alone && s.Leader.Since != nil {
		who += ": " + s.Leader.Name
	}
	var parts []string
	switch {
	case r.Works && r.alone && s.Leader.Since != nil:
		parts = append(parts, "since "+s.since(*s.Leader.Since))
	case r.Since != nil:
		parts = append(parts, "connected since "+s.since(*r.Since))
	}
	if !r.Relay {
		return who, strings.Join(append(parts, "holds a lock of the outbox and does not look like a relay"), ", ")
	}
	if !r.Broker {
		parts = append(parts, "RabbitMQ NOT USABLE")
	} else {
		parts = append(parts, "RabbitMQ usable")
	}
	switch {
	case !r.Works:
	case r.Listening:
		parts = append(parts, "LISTEN works")
	default:
		parts = append(parts, "LISTEN NOT PROVED")
	}
	if r.Paused {
		parts = append(parts, "obeys the pause")
	}
	return who, strings.Join(parts, ", ")
}

func (s *Status) doorbellLine() string {
	d := s.Doorbell
	text := map[Doorbell]string{
		Asleep: "asleep: each commit rings",
		Awake:  "awake: writers are silent, the relay polls",
		Deaf:   "deaf: no relay can or may publish",
	}[d.State]
	if d.SilentWriters > 0 {
		text += fmt.Sprintf("; not committed yet: %s, the oldest: %s%s", counted(d.SilentWriters, "silent writer"), d.oldestWho, age(", for %s", d.OldestAge))
	}
	return text
}

func (c Count) String() string {
	if c.AtLeast {
		return fmt.Sprintf("at least %d", c.N)
	}
	return fmt.Sprint(c.N)
}

// of says of what there are so many: "1 event", "at least 100000 events".
func (c Count) of(thing string) string {
	if c.N == 1 {
		return c.String() + " " + thing
	}
	return c.String() + " " + thing + "s"
}

// counted says how many there are of a thing, whose plural ends in s: "1 event", "2 events".
func counted[T int | int64](n T, thing string) string { return Count{N: int64(n)}.of(thing) }

// since is a time and how long ago that was.
func (s *Status) since(t time.Time) string {
	return fmt.Sprintf("%s (%s ago)", clock(t), shortly(s.At.Sub(t)))
}

func clock(t time.Time) string { return t.UTC().Format("2006-01-02 15:04:05Z") }

func inTime(d time.Duration) string {
	if d <= 0 {
		return "due"
	}
	return "in " + shortly(d)
}

// shortly rounds a duration to what a person wants to know.
func shortly(d time.Duration) string {
	d = max(d, 0)
	switch {
	case d >= 48*time.Hour:
		return fmt.Sprintf("%.0f days", d.Hours()/24)
	case d >= time.Minute:
		return strings.TrimSuffix(d.Round(time.Minute).String(), "0s")
	case d >= time.Second:
		return d.Round(time.Second).String()
	}
	return d.Round(time.Millisecond).String()
}

// age formats seconds, if known.
func age(format string, seconds *float64) string {
	if seconds == nil {
		return ""
	}
	return fmt.Sprintf(format, shortly(time.Duration(*seconds*float64(time.Second))))
}

// rounded keeps one decimal of small rates.
func rounded(rate float64) string {
	if rate < 10 {
		return fmt.Sprint(math.Round(rate*10) / 10)
	}
	return fmt.Sprintf("%.0f", rate)
}
