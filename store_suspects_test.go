package main

import (
	"io"
	"testing"

	"outbox-relay/internal/migrate"
	"outbox-relay/internal/testenv"
)

// Two relays whose sessions are cut by turns live both: nobody is suspected, and nothing is set
// aside because of an outage. Relays that never come back are dead.
func TestLostSessionIsNoDeath(t *testing.T) {
	dsn, db := testenv.OpenDatabase(t)
	if err := migrate.Run(t.Context(), dsn, io.Discard); err != nil {
		t.Fatal(err)
	}
	_, err := db.ExecContext(t.Context(), `INSERT INTO outbox_events (aggregate_type, aggregate_id, event_type, payload) VALUES ('a', '1', 'e', '{}')`)
	if err != nil {
		t.Fatal(err)
	}
	cfg := testConfig()
	cfg.DatabaseURL, cfg.AMQPMaxMessageBytes = dsn, 1<<20
	// works leads, notes the event in hand, and loses its session.
	works := func(name string, again bool, noted map[string]bool) (deaths, ofEvent int) {
		t.Helper()
		s, err := NewStore(cfg).Open(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		defer s.Discard()
		testenv.Until(t, func() bool { // the server may not know yet that the session before has ended
			led, n, err := s.Lead(name, again)
			if err != nil {
				t.Fatal(err)
			}
			deaths = n
			return led
		})
		e, ofEvent, err := s.Suspect(ClaimQuery{Mark: -1, Bytes: 1 << 20}, noted)
		if err != nil || e == nil {
			t.Fatalf("suspect = %v, %v", e, err)
		}
		noted[e.ID] = true
		return deaths, ofEvent
	}

	a, b := make(map[string]bool), make(map[string]bool)
	for i := range 6 {
		works("a", i > 0, a)
		if deaths, ofEvent := works("b", i > 0, b); deaths > 1 || ofEvent > 2 {
			t.Fatalf("turn %d: %d deaths, %d of the event; want 1 at most, as either may be dead, and 2", i, deaths, ofEvent)
		}
	}
	for i, name := range []string{"c", "d", "e"} {
		deaths, ofEvent := works(name, false, make(map[string]bool))
		if deaths != i+2 || ofEvent != i+3 {
			t.Errorf("relay %s: %d deaths, %d of the event; want %d and %d", name, deaths, ofEvent, i+2, i+3)
		}
	}
}
