package main

import (
	"io"
	"reflect"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"outbox-relay/internal/testenv"
	sqlfiles "outbox-relay/sql"
)

func TestDoctorInJSONIsDocumented(t *testing.T) {
	have := jsonPaths(reflect.TypeFor[Report](), "")
	slices.Sort(have)
	if diff := cmp.Diff(have, documentedPaths(t, "doctor")); diff != "" {
		t.Errorf("docs/commands.md differs (-doctor +page):\n%s", diff)
	}
}

func TestTimeToTheDeadLetter(t *testing.T) {
	for _, tc := range []struct {
		attempts int
		want     time.Duration
	}{{1, 0}, {2, time.Second}, {4, 7 * time.Second}, {1_000_000, 1000 * time.Hour}} {
		c := Config{MaxAttempts: tc.attempts, RetryBase: time.Second, RetryMax: time.Hour}
		if got := c.untilDead(); got != tc.want {
			t.Errorf("%d attempts take %v, want %v, in each run the same", tc.attempts, got, tc.want)
		}
	}
}

// Sessions and prepared transactions that hold vacuum back, with what ends them.
func TestOldTransactionsAreNamed(t *testing.T) {
	dsn, db := testenv.OpenDatabase(t)
	testenv.MustExec(t, db, sqlfiles.Schema)
	o := openTestOperator(t, dsn, "doctor")
	tx := testenv.Begin(t, db, "SET TRANSACTION ISOLATION LEVEL REPEATABLE READ")
	pid := testenv.QueryInt(t, tx, "SELECT pg_backend_pid()")
	found, err := queryText(t.Context(), o, "SELECT a || ' -> ' || c FROM ("+
		strings.TrimSuffix(sqlfiles.Doctor("old transactions"), ";")+") x (a, b, c)", 0)
	if err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{"session with pid " + strconv.Itoa(pid), "SELECT pg_terminate_backend(" + strconv.Itoa(pid) + ")"} {
		if !strings.Contains(found, want) {
			t.Errorf("found %q, want %q", found, want)
		}
	}
	d := &doctor{live: io.Discard}
	if d.checkHorizon(t.Context(), o, false); d.findings[len(d.findings)-1].Check != "snapshots" {
		t.Errorf("findings = %+v", d.findings)
	}
}

// A relay that has only just connected is not judged by what it has not got yet.
func TestYoungRelayIsNoFault(t *testing.T) {
	now := time.Now()
	for age, want := range map[time.Duration]Level{time.Second: LevelOK, time.Minute: LevelFault} {
		since := now.Add(-age)
		d := &doctor{cfg: Config{Ordering: orderingNone}, live: io.Discard}
		d.checkRelays(&Status{At: now, Relays: []RelayStatus{{PID: 1, Relay: true, Works: true, Since: &since}}})
		if f := d.findings[0]; f.Level != want {
			t.Errorf("connected since %v, broker not usable yet: %+v, want %s", age, f, want)
		}
	}
}
