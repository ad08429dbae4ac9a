package main

import (
	"cmp"
	"database/sql/driver"
	"testing"
	"time"

	gocmp "github.com/google/go-cmp/cmp"

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

// The two ways to claim find the same, whatever lies in the outbox, and the short one is taken where it
// should: when few events are small and none has failed.
func TestBothClaimsFindTheSame(t *testing.T) {
	const fill = `INSERT INTO outbox_events (aggregate_type, aggregate_id, event_type, payload, headers, attempts, processed_at, retry_after, dead_at, last_error)
		SELECT 'order', (i % 5)::text, 'test', to_jsonb(i), CASE WHEN i % 4 = 0 THEN '{"tenant": "a"}'::jsonb END, i % 3,
		       CASE WHEN i % 3 = 0 THEN now() END, NULL, NULL, CASE WHEN i = 7 THEN 'rejected: the broker closed the channel: 406' END
		FROM generate_series(1, 24) i;
		UPDATE outbox_relay_state SET released = 3;
		ALTER TABLE outbox_events ALTER seq DROP IDENTITY`
	const plain = `ALTER TABLE outbox_events ALTER payload SET STORAGE EXTERNAL, ALTER headers SET STORAGE EXTERNAL;`
	for name, tt := range map[string]struct {
		change   string
		hold     bool
		limit    int
		bytes    int64
		maxBytes int64
		few      bool // the short one does it
	}{
		"little to do":                          {few: true},
		"nothing to do":                         {change: `UPDATE outbox_events SET processed_at = now()`, few: true},
		"old rows of one seq":                   {change: `UPDATE outbox_events SET seq = 0`, few: true},
		"created at no time":                    {change: `UPDATE outbox_events SET created_at = 'infinity'`, few: true},
		"an old dead letter":                    {change: `UPDATE outbox_events SET dead_at = now() WHERE seq = 4`, few: true},
		"a dead letter that holds":              {change: `UPDATE outbox_events SET dead_at = now() WHERE seq = 4`, hold: true},
		"a failure that is due":                 {change: `UPDATE outbox_events SET retry_after = now() - interval '1 s' WHERE seq = 4`},
		"a failure that is not due":             {change: `UPDATE outbox_events SET retry_after = now() + interval '1 h' WHERE seq = 4`},
		"many":                                  {change: `UPDATE outbox_events SET processed_at = NULL`},
		"a payload as large as a row holds":     {change: `UPDATE outbox_events SET payload = to_jsonb(repeat('x', 1900))`, few: true},
		"a payload that compresses well":        {change: `UPDATE outbox_events SET payload = to_jsonb(repeat('x', 50000)) WHERE seq = 8`, few: true},
		"a payload that does not":               {change: plain + `UPDATE outbox_events SET payload = to_jsonb(repeat('x', 5000)) WHERE seq = 8`},
		"large headers":                         {change: plain + `UPDATE outbox_events SET headers = jsonb_build_object('h', repeat('x', 5000)) WHERE seq = 8`},
		"more bytes than may be claimed":        {change: `UPDATE outbox_events SET payload = to_jsonb(repeat('x', 500))`, bytes: 1000},
		"a payload over the limit of a message": {change: `UPDATE outbox_events SET payload = to_jsonb(repeat('x', 1500)) WHERE seq = 8`, maxBytes: 1000},
		"a small limit":                         {limit: 2},
		"no state row":                          {change: `DELETE FROM outbox_relay_state`},
	} {
		t.Run(name, func(t *testing.T) {
			dsn, db := testenv.OpenDatabase(t)
			migrated(t, dsn)
			testenv.MustExec(t, db, fill)
			s := openSession(t, dsn, orderingAggregate)
			testenv.MustExec(t, db, tt.change)
			s.st.cfg.AMQPMaxMessageBytes = cmp.Or(tt.maxBytes, 1<<20)
			if tt.hold {
				s.st.cfg.OnDeadLetter = onDeadLetterHold
			}
			for _, mark := range []int64{-1, 3, 20} {
				q := ClaimQuery{Mark: mark, Limit: cmp.Or(tt.limit, 1000), Bytes: cmp.Or(tt.bytes, 1<<20)}
				for _, inHand := range []int{0, 2} {
					want, err := s.queryClaim(s.claim, q)
					if err != nil {
						t.Fatal(err)
					}
					got, few := Claim{}, false
					if s.mayBeFew(q) {
						if got, few, err = s.queryFew(q); err != nil {
							t.Fatal(err)
						}
					}
					if mark < 20 && few != tt.few { // behind 20 there is nothing that would be too much
						t.Errorf("from %d, %d in hand: the short claim does it = %v, want %v", mark, inHand, few, tt.few)
					}
					if diff := gocmp.Diff(want, got); few && diff != "" {
						t.Errorf("from %d, %d in hand: the short claim differs (-long +short):\n%s", mark, inHand, diff)
					}
					for _, e := range want.Events[:min(2, len(want.Events))] {
						q.InHand = append(q.InHand, e.ID)
					}
				}
			}
		})
	}
}

// A busy outbox is not asked twice each time.
func TestAfterManyEventsTheShortClaimRests(t *testing.T) {
	dsn, db := testenv.OpenDatabase(t)
	migrated(t, dsn)
	s := openSession(t, dsn, orderingAggregate)
	for range few + 1 {
		testenv.InsertEvent(t, db)
	}
	q := ClaimQuery{Mark: -1, Limit: 1000, Bytes: 1 << 20}
	if !s.mayBeFew(q) {
		t.Error("the short claim is not asked first")
	}
	if c, err := s.Claim(q); err != nil || len(c.Events) != few+1 {
		t.Fatalf("claim = %d events, %v", len(c.Events), err)
	}
	if s.mayBeFew(q) {
		t.Error("the short claim is asked again at once")
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
