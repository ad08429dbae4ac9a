package main

import (
	"database/sql/driver"
	"testing"
	"time"

	"outbox-relay/internal/testenv"
)

// openSession opens a working session on an outbox at dsn, which has the work lock.
func openSession(t *testing.T, dsn, ordering string) *WorkingSession {
	t.Helper()
	cfg := testConfig()
	cfg.DatabaseURL, cfg.Ordering, cfg.AMQPMaxMessageBytes = dsn, ordering, 1<<20
	s, err := NewStore(cfg).Open(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(s.Discard)
	if led, _, err := s.Lead("test", false); !led || err != nil {
		t.Fatalf("lead = %v, %v", led, err)
	}
	return s
}

func claimOne(t *testing.T, s *WorkingSession) *Event {
	t.Helper()
	c, err := s.Claim(ClaimQuery{Mark: -1, Limit: 1, Bytes: 1 << 20})
	if err != nil || len(c.Events) != 1 {
		t.Fatalf("claim = %+v, %v", c, err)
	}
	return c.Events[0]
}

// What was confirmed before the locks were lost is marked later, also while another relay has the row.
func TestUnorderedSettlePassesRowsOfAnotherRelayOver(t *testing.T) {
	dsn, db := testenv.OpenDatabase(t)
	migrated(t, dsn)
	testenv.InsertEvent(t, db)
	a, b := openSession(t, dsn, orderingNone), openSession(t, dsn, orderingNone)
	e := claimOne(t, b)
	for _, skip := range []bool{false, true} {
		settled, err := a.Settle(Settlement{Confirmed: []*Event{e}, SkipLocked: skip})
		if err != nil || settled.Changed != 0 || len(settled.Locked) != 1 {
			t.Errorf("settle, skip locked %v = %+v, %v; want the row left for later", skip, settled, err)
		}
	}
	if _, err := b.Settle(Settlement{Confirmed: []*Event{e}}); err != nil {
		t.Error(err)
	}
	if settled, err := a.Settle(Settlement{Confirmed: []*Event{e}, SkipLocked: true}); err != nil || len(settled.Locked) != 0 {
		t.Errorf("settle = %+v, %v; want nothing left: the other relay marked it", settled, err)
	}
}

// created_at is the application's and may say anything.
func TestEventThatCanNeverBeSentIsDeadWhateverItsCreatedAt(t *testing.T) {
	dsn, db := testenv.OpenDatabase(t)
	migrated(t, dsn)
	s := openSession(t, dsn, orderingAggregate)
	for _, created := range []string{"infinity", "tomorrow", "-infinity", "now"} {
		testenv.MustExec(t, db, `DELETE FROM outbox_events`)
		testenv.MustExec(t, db, `INSERT INTO outbox_events (aggregate_type, aggregate_id, event_type, payload, created_at)
			VALUES ('order', '1', 'test', '{}', '`+created+`')`)
		e := claimOne(t, s)
		if _, err := s.Settle(Settlement{Failed: []Failure{{Event: e, Attempts: 1, Retry: time.Second, Dead: true, Reason: "too large"}}}); err != nil {
			t.Fatal(err)
		}
		if n := testenv.QueryInt(t, db, "SELECT count(*) FROM outbox_events WHERE dead_at IS NOT NULL AND retry_after IS NULL"); n != 1 {
			t.Errorf("created_at %s: no dead letter", created)
		}
	}
}

// BenchmarkReadEvent is the reading of a claimed row, as the driver hands it over.
func BenchmarkReadEvent(b *testing.B) {
	row := []driver.Value{
		nil, "0190b9a1-6f0e-7c3a-9a52-6f1f3c0f4b11", int64(7), "order", "42", "order.placed", `{"total": 12.50}`,
		nil, `{"tenant": "a"}`, int64(0), int64(1_770_000_000_000_000), nil, nil,
	}
	b.ReportAllocs()
	for b.Loop() {
		if e := eventOf(row, "application/json"); e.Seq != 7 {
			b.Fatal(e)
		}
	}
}

// BenchmarkSettleArguments is what is made of 500 confirmed events for the statement that marks them.
func BenchmarkSettleArguments(b *testing.B) {
	ids := make([]string, 500)
	for i := range ids {
		ids[i] = eventNumber(i).ID
	}
	b.ReportAllocs()
	for b.Loop() {
		if len(uuidArray(ids)) != 500*37+1 {
			b.Fatal(len(uuidArray(ids)))
		}
	}
}
