package main

import (
	"bytes"
	"strings"
	"testing"
	"time"

	"go.uber.org/goleak"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func TestTally(t *testing.T) {
	t.Parallel()
	start := time.Now()
	after := func(ms int) time.Time { return start.Add(time.Duration(ms) * time.Millisecond) }
	first, second := order{ID: 7, Version: 1}, order{ID: 7, Version: 2}

	for name, test := range map[string]struct {
		do   func(*tally)
		want report
	}{
		"nothing yet": {func(*tally) {}, report{}},
		"an event on its way is missing": {
			func(t *tally) { t.committed("a", start) },
			report{committed: 1, missing: 1},
		},
		"the delay counts from the commit": {
			func(t *tally) { t.committed("a", start); t.delivered("a", true, first, after(3)) },
			report{committed: 1, delivered: 1, p50: 3 * time.Millisecond, p99: 3 * time.Millisecond, longest: 3 * time.Millisecond},
		},
		"an event may arrive before the writer hears of its commit": {
			func(t *tally) { t.delivered("a", true, first, start); t.committed("a", after(1)) },
			report{committed: 1, delivered: 1},
		},
		"a second delivery is a duplicate, and changes nothing else": {
			func(t *tally) {
				t.committed("a", start)
				t.delivered("a", true, first, start)
				t.delivered("a", false, first, after(9))
			},
			report{committed: 1, delivered: 1, duplicates: 1},
		},
		"an event of a rolled-back transaction is a phantom": {
			func(t *tally) { t.rolledBack("a"); t.delivered("a", true, first, start) },
			report{rolledBack: 1, phantoms: 1},
		},
		"an event of somebody else is neither": {
			func(t *tally) { t.delivered("a", true, order{}, start) },
			report{others: 1},
		},
		"an older version after a newer one is out of order": {
			func(t *tally) { t.delivered("b", true, second, start); t.delivered("a", true, first, start) },
			report{others: 2, disorder: 1},
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			tally := newTally()
			test.do(tally)
			if got := tally.report(); got != test.want {
				t.Errorf("got  %+v\nwant %+v", got, test.want)
			}
		})
	}
}

func TestPercentile(t *testing.T) {
	t.Parallel()
	var sorted []time.Duration
	for i := range 200 {
		sorted = append(sorted, time.Duration(i+1))
	}
	for p, want := range map[int]time.Duration{0: 1, 50: 100, 99: 198, 100: 200} {
		if got := percentile(sorted, p); got != want {
			t.Errorf("percentile %d = %d, want %d", p, got, want)
		}
	}
	if got := percentile(sorted[:1], 99); got != 1 {
		t.Errorf("percentile of one value = %d, want it", got)
	}
}

func TestSummary(t *testing.T) {
	t.Parallel()
	good := report{committed: 9, delivered: 9, duplicates: 2, rolledBack: 1}
	for name, test := range map[string]struct {
		change  func(r *report)
		effects int
		fault   string
	}{
		"all is well":                        {func(*report) {}, 9, ""},
		"events of others have effects, too": {func(r *report) { r.others = 3 }, 12, ""},
		"nothing was committed":              {func(r *report) { r.committed, r.delivered = 0, 0 }, 0, "nothing was committed"},
		"an event is missing":                {func(r *report) { r.delivered, r.missing = 8, 1 }, 8, "missing            1"},
		"an effect came twice":               {func(*report) {}, 10, "effects           10"},
		"a phantom arrived":                  {func(r *report) { r.phantoms = 1 }, 10, "phantoms           1"},
		"events were out of order":           {func(r *report) { r.disorder = 4 }, 9, "out of order       4"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			r := good
			test.change(&r)
			var out bytes.Buffer
			err := (&screen{out: &out}).summary(r, test.effects)
			if (err != nil) != (test.fault != "") {
				t.Fatalf("error = %v", err)
			}
			if err != nil && !strings.Contains(out.String()+err.Error(), test.fault) {
				t.Errorf("no %q in\n%s%v", test.fault, out.String(), err)
			}
			if strings.Contains(out.String(), "\x1b") {
				t.Error("colour where it was not asked for")
			}
		})
	}
}
