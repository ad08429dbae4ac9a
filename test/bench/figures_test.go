package bench

import (
	"math"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

func TestPercentileIsTheNearestRank(t *testing.T) {
	t.Parallel()
	values := []float64{1, 2, 3, 4, 5, 6, 7, 8, 9, 10}
	for p, want := range map[float64]float64{0: 1, 10: 1, 11: 2, 50: 5, 99: 10, 100: 10} {
		if got := percentile(values, p); got != want {
			t.Errorf("percentile %v = %v, want %v", p, got, want)
		}
	}
	if got := percentile([]float64{7}, 50); got != 7 {
		t.Errorf("percentile 50 of one value = %v, want that", got)
	}
}

func TestSpreadLeavesVoidRunsOut(t *testing.T) {
	t.Parallel()
	nan := math.NaN()
	for _, c := range []struct {
		values []float64
		want   spread
	}{
		{nil, spread{}},
		{[]float64{nan}, spread{}},
		{[]float64{3, nan, 1, 2}, spread{median: 2, low: 1, high: 3, n: 3}},
		{[]float64{4, 1}, spread{median: 2.5, low: 1, high: 4, n: 2}},
	} {
		if got := newSpread(c.values); got != c.want {
			t.Errorf("spread of %v = %+v, want %+v", c.values, got, c.want)
		}
	}
}

func TestNumbersHaveThreeDigits(t *testing.T) {
	t.Parallel()
	for v, want := range map[float64]string{0: "0.00", 0.946: "0.95", 1.234: "1.23", 12.34: "12.3", 123.4: "123", 60000: "60000"} {
		if got := number3(v); got != want {
			t.Errorf("number3(%v) = %s, want %s", v, got, want)
		}
	}
}

func TestEventsCarryTheirNumber(t *testing.T) {
	t.Parallel()
	for _, n := range []int{0, 7, 59_999} {
		if got := number([]byte(body(n, padding(200)))); got != n {
			t.Errorf("number of event %d = %d", n, got)
		}
	}
	for _, text := range []string{"", "{}", `{"n": `, `{"n": "1"}`} {
		if got := number([]byte(text)); got != -1 {
			t.Errorf("number of %q = %d, want -1", text, got)
		}
	}
	if got := len(body(12345, padding(200))); got != 200 {
		t.Errorf("a payload of 200 bytes has %d", got)
	}
}

func TestReport(t *testing.T) {
	t.Parallel()
	r := &recorder{values: make(map[key][]float64)}
	r.note(t, key{scenario: "drain", variant: "relay"}, 0, figures{"rate": 9000, "cpu_us": 20})
	r.note(t, key{scenario: "drain", variant: "ceiling"}, 0, nil) // void
	for run, rate := range []float64{9500, 9900} {
		r.note(t, key{scenario: "drain", variant: "relay"}, run+1, figures{"rate": rate, "cpu_us": 14})
		r.note(t, key{scenario: "drain", variant: "ceiling"}, run+1, figures{"rate": 10000})
	}
	all := []scenario{{
		name:     "drain",
		variants: []variant{{"relay", nil}, {"ceiling", nil}, {"plain", nil}},
		rows: []row{
			{"drain", "events/s", "rate", "relay", "ceiling", goal{ratio: 0.95}},
			{"the same of a plain relay", "events/s", "rate", "plain", "ceiling", goal{ratio: 0.95}},
			{"CPU", "us/event", "cpu_us", "relay", "", goal{value: 13, most: true}},
		},
	}}

	var table strings.Builder
	if err := r.table(&table, all); err != nil {
		t.Fatal(err)
	}
	var got []string
	for line := range strings.Lines(table.String()) {
		got = append(got, strings.Join(strings.Fields(line), " "))
	}
	// The ratio is of the two runs that have both; a variant without figures has no line.
	want := []string{
		"scenario figure value spread baseline ratio spread goal reached",
		"drain drain 9500 events/s 9000..9900 ceiling: 10000 0.97 0.95..0.99 at least 0.95 x yes",
		"drain CPU 14.0 us/event 14.0..20.0 at most 13.0 no",
		"",
		"not reached: drain: CPU",
		`why, by profiles, and what was tried: docs/benchmarks.md, "What keeps the missed goals away"`,
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("table (-want +got):\n%s", diff)
	}

	var plot strings.Builder
	r.plot(&plot, all)
	wantPlot := "\ndrain, rate, events/s\n" +
		"  relay                 " + strings.Repeat("#", 48) + " 9500\n" +
		"  ceiling               " + strings.Repeat("#", 50) + " 10000\n"
	if diff := cmp.Diff(wantPlot, plot.String()); diff != "" {
		t.Errorf("plot (-want +got):\n%s", diff)
	}
}

func TestOneSettingIsNameAndValue(t *testing.T) {
	t.Parallel()
	var l list
	if l.Set("BATCH_SIZE=10") != nil || l.Set("AMQP_MANDATORY=false") != nil || len(l) != 2 {
		t.Errorf("settings = %q, want both", l)
	}
	if l.Set("BATCH_SIZE") == nil {
		t.Error("a setting without a value is taken")
	}
}
