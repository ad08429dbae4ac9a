package main

import (
	"fmt"
	"io"
	"log/slog"
	"regexp"
	"time"
)

// Keys of log attributes, so that one thing has one name everywhere. Every line about an event
// has the first four. A payload and a password are never logged.
const (
	keyEventID     = "event_id"
	keyEventType   = "event_type"
	keyAggregateID = "aggregate_id"
	keyAttempt     = "attempt"
	keyErr         = "err"
	keyServer      = "server"
	keyReason      = "reason"
	keyCount       = "count"
	keyDuration    = "duration"
)

// eventAttrs are the attributes of a line about an event. The attempt is the one at hand: 1 for
// the first delivery.
func eventAttrs(e *Event) []any {
	return []any{keyEventID, e.ID, keyEventType, e.EventType, keyAggregateID, e.AggregateID, keyAttempt, e.Attempts + 1}
}

// newLogger makes the logger that is handed to everybody; slog.Default is never used. level and
// format are those of a validated Config.
func newLogger(w io.Writer, level, format string) (*slog.Logger, error) {
	var l slog.Level
	if err := l.UnmarshalText([]byte(level)); err != nil {
		return nil, fmt.Errorf("log level: %w", err)
	}
	opts := &slog.HandlerOptions{Level: l, ReplaceAttr: readableDurations}
	if format == "text" {
		return slog.New(slog.NewTextHandler(w, opts)), nil
	}
	return slog.New(slog.NewJSONHandler(w, opts)), nil
}

// readableDurations writes a duration as "1m30s"; JSON would hold nanoseconds.
func readableDurations(_ []string, a slog.Attr) slog.Attr {
	if a.Value.Kind() == slog.KindDuration {
		a.Value = slog.StringValue(a.Value.Duration().String())
	}
	return a
}

// repeatEvery is how often an error that stays the same is logged.
const repeatEvery = time.Minute

// repeatLog logs an error that keeps coming back: once, again when it changes or every minute,
// and how often it came when it is over. For one goroutine; log and what must be set.
type repeatLog struct {
	log  *slog.Logger // with what all lines share, the server say
	what string       // what is tried, like "connect"; opens each line

	failures int       // in a row
	since    time.Time // of the first of these
	last     string    // the error as last logged
	logged   time.Time // when that was
}

// localPort matches the port of our own end in an error of package net, which is another in
// each attempt and no reason to log again.
var localPort = regexp.MustCompile(`:\d+->`)

// Failed takes note of an error; args are further attributes of the line.
func (r *repeatLog) Failed(err error, args ...any) {
	now := time.Now()
	if r.failures == 0 {
		r.since = now
	}
	r.failures++
	text := localPort.ReplaceAllString(err.Error(), "->")
	if text == r.last && now.Sub(r.logged) < repeatEvery {
		return
	}
	r.last, r.logged = text, now
	args = append([]any{keyErr, err}, args...)
	if r.failures > 1 {
		args = append(args, keyCount, r.failures, keyDuration, now.Sub(r.since).Round(time.Millisecond))
	}
	r.log.Warn(r.what+": failing", args...)
}

// OK takes note of a success, which is worth a line only when failures came before it.
func (r *repeatLog) OK(args ...any) {
	if r.failures == 0 {
		return
	}
	args = append(args, keyCount, r.failures, keyDuration, time.Since(r.since).Round(time.Millisecond))
	r.log.Info(r.what+": works again", args...)
	*r = repeatLog{log: r.log, what: r.what}
}
