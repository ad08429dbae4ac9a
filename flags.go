package main

import (
	"errors"
	"fmt"

	sqlfiles "outbox-relay/sql"
)

// Flag is a condition that a relay shows to people who look into the database. It is an advisory
// lock on the outbox, shared, that nobody ever waits for: it costs no write, ends with the session
// whatever becomes of the relay, any role sees it in pg_locks, and relays side by side have one each.
// Its value is the class of the lock.
type Flag int32

const (
	FlagRelay     = Flag(sqlfiles.RelayFlagClass)  // there is a relay: it works or stands by
	FlagPaused    = Flag(sqlfiles.PausedFlagClass) // it obeys the pause, and has nothing in flight any more
	FlagListening = Flag(sqlfiles.ListenFlagClass) // notifications arrive, as the last proof has shown
	FlagBroker    = Flag(sqlfiles.BrokerFlagClass) // the broker is connected and not blocked
)

// Show raises or lowers a flag. It must not be asked for the state that the flag is in.
func (s *WorkingSession) Show(flag Flag, up bool) error {
	section := "flag up"
	if !up {
		section = "flag down"
	}
	var done bool
	if err := s.queryRow(sqlfiles.SessionLock(section, int32(flag), s.table), []any{&done}); err != nil {
		return fmt.Errorf("%s: %w", section, err)
	}
	return nil
}

// NoteError writes down what went wrong last, for `outbox-relay status`.
func (s *WorkingSession) NoteError(text string) error {
	if _, err := s.exec(sqlfiles.Session("note error"), text); err != nil {
		return fmt.Errorf("note an error: %w", err)
	}
	return nil
}

// showFlags brings the flags up to date.
func (r *Relay) showFlags() error {
	for flag, up := range map[Flag]bool{
		FlagRelay:     true,
		FlagPaused:    r.paused && r.inFlight == 0 && len(r.done) == 0,
		FlagListening: r.listen.state == listenWorks,
		FlagBroker:    linkTrouble(r.link) == nil,
	} {
		if r.shown[flag] == up {
			continue
		}
		if err := r.session.Show(flag, up); err != nil {
			return err
		}
		r.shown[flag] = up
	}
	return nil
}

// noteTrouble writes down what is wrong when that is something else than a moment ago.
func (r *Relay) noteTrouble() error {
	trouble := r.lost
	r.lost = ""
	if err := linkTrouble(r.link); trouble == "" && err != nil && !errors.Is(err, errStarting) {
		trouble = checkRabbitMQ + ": " + err.Error()
	}
	if trouble == "" && r.listen.state == listenFails {
		trouble = "notifications do not arrive"
	}
	trouble = oneLine(localPort.ReplaceAllString(trouble, "->"))
	if trouble == r.trouble {
		return nil
	}
	r.trouble = trouble
	if trouble == "" {
		return nil
	}
	return r.session.NoteError(trouble)
}
