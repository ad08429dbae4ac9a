package main

import (
	"fmt"

	sqlfiles "outbox-relay/sql"
)

// Suspect finds the next event of an ordered outbox without reading what it holds, and notes
// that it is about to be taken in hand. deaths is how often that was noted, this time included, but
// not again for what this relay has noted before; the event is nil when there is none.
func (s *WorkingSession) Suspect(q ClaimQuery, noted map[string]bool) (e *Event, deaths int, err error) {
	stmt, err := s.prepare(sqlfiles.Claim(true, true, s.payloadType))
	if err != nil {
		return nil, 0, err
	}
	defer func() { _ = s.conn.Raw(func(any) error { return stmt.Close() }) }()
	q.Limit = 1
	c, err := s.queryClaim(stmt, q)
	if err != nil {
		return nil, 0, fmt.Errorf("look for suspects: %w", err)
	}
	if len(c.Events) == 0 {
		return nil, 0, nil
	}
	e = c.Events[0]
	more := 1
	if noted[e.ID] {
		more = 0
	}
	if err := s.queryRow(sqlfiles.Session("suspect"), []any{&deaths}, e.ID, more); err != nil {
		return nil, 0, fmt.Errorf("note a suspect: %w", err)
	}
	return e, deaths, nil
}

// Acquit forgets the suspicion against an event that was settled.
func (s *WorkingSession) Acquit(id string) error {
	if _, err := s.exec(sqlfiles.Session("acquit"), id); err != nil {
		return fmt.Errorf("acquit a suspect: %w", err)
	}
	return nil
}

// AcquitAll ends all suspicion, and with it the count of relays that died.
func (s *WorkingSession) AcquitAll() error {
	if _, err := s.exec(sqlfiles.Session("acquit all")); err != nil {
		return fmt.Errorf("acquit all suspects: %w", err)
	}
	return nil
}
