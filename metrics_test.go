package main

import (
	"bufio"
	"fmt"
	"os"
	"regexp"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/testutil"
)

func TestMetricsPassTheLinter(t *testing.T) {
	reg := prometheus.NewPedanticRegistry()
	newMetrics(reg)
	problems, err := testutil.GatherAndLint(reg)
	if err != nil {
		t.Fatal(err)
	}
	for _, p := range problems {
		t.Errorf("%s: %s", p.Metric, p.Text)
	}
}

func TestMetricsStandAtZeroFromTheStart(t *testing.T) {
	reg := prometheus.NewPedanticRegistry()
	newMetrics(reg)
	want := strings.NewReader(`
# HELP outbox_doorbell_state 1 for the state the doorbell is in: asleep (every commit rings), awake (the relay polls), deaf (it cannot publish).
# TYPE outbox_doorbell_state gauge
outbox_doorbell_state{state="asleep"} 0
outbox_doorbell_state{state="awake"} 0
outbox_doorbell_state{state="deaf"} 1
# HELP outbox_event_outcomes_total What became of events handed to the publisher.
# TYPE outbox_event_outcomes_total counter
outbox_event_outcomes_total{outcome="confirmed"} 0
outbox_event_outcomes_total{outcome="late"} 0
outbox_event_outcomes_total{outcome="nacked"} 0
outbox_event_outcomes_total{outcome="rejected"} 0
outbox_event_outcomes_total{outcome="released"} 0
outbox_event_outcomes_total{outcome="returned"} 0
outbox_event_outcomes_total{outcome="unknown"} 0
# HELP outbox_events_failed_total Failed attempts of events, by event type; types beyond the first 100 count as other.
# TYPE outbox_events_failed_total counter
outbox_events_failed_total{event_type="other"} 0
# HELP outbox_reconnects_total Links made anew after one was lost.
# TYPE outbox_reconnects_total counter
outbox_reconnects_total{server="listener"} 0
outbox_reconnects_total{server="postgres"} 0
outbox_reconnects_total{server="rabbitmq"} 0
# HELP outbox_wakeups_total What made the relay look for events.
# TYPE outbox_wakeups_total counter
outbox_wakeups_total{cause="awake"} 0
outbox_wakeups_total{cause="fallback"} 0
outbox_wakeups_total{cause="notify"} 0
outbox_wakeups_total{cause="reconnect"} 0
outbox_wakeups_total{cause="retry"} 0
outbox_wakeups_total{cause="start"} 0
`)
	if err := testutil.GatherAndCompare(reg, want, "outbox_doorbell_state", "outbox_event_outcomes_total",
		"outbox_events_failed_total", "outbox_reconnects_total", "outbox_wakeups_total"); err != nil {
		t.Error(err)
	}
}

func TestSetDoorbellLeavesExactlyOneState(t *testing.T) {
	m := newMetrics(prometheus.NewPedanticRegistry())
	for _, state := range doorbells {
		m.SetDoorbell(state)
		for d, g := range m.doorbell {
			want := 0.0
			if d == state {
				want = 1
			}
			if got := testutil.ToFloat64(g); got != want {
				t.Errorf("after SetDoorbell(%s): %s = %v, want %v", state, d, got, want)
			}
		}
	}
}

func TestCountFailedBoundsTheTypes(t *testing.T) {
	reg := prometheus.NewPedanticRegistry()
	m := newMetrics(reg)
	for i := range 150 {
		m.CountFailed(fmt.Sprintf("type-%d", i))
	}
	m.CountFailed("type-3")   // has its own series
	m.CountFailed("type-149") // has none
	m.CountFailed("other")

	if got, want := testutil.CollectAndCount(m.failed), maxFailedTypes+1; got != want {
		t.Errorf("series = %d, want %d", got, want)
	}
	for label, want := range map[string]float64{"type-0": 1, "type-3": 2, "type-99": 1, "other": 52} {
		if got := testutil.ToFloat64(m.failed.WithLabelValues(label)); got != want {
			t.Errorf("failed{event_type=%q} = %v, want %v", label, got, want)
		}
	}
}

func TestCountFailedTakesAnyBytes(t *testing.T) {
	reg := prometheus.NewPedanticRegistry()
	m := newMetrics(reg)
	m.CountFailed("a\xff")
	m.CountFailed("a\xfe") // the same label once made valid
	m.CountFailed("")
	if _, err := reg.Gather(); err != nil {
		t.Error(err)
	}
}

func BenchmarkCountFailed(b *testing.B) {
	m := newMetrics(prometheus.NewRegistry())
	b.ReportAllocs()
	for b.Loop() {
		m.CountFailed("order.created")
	}
}

// TestMetricsPageIsComplete compares docs/metrics.md with what is registered, both ways.
func TestMetricsPageIsComplete(t *testing.T) {
	reg := prometheus.NewPedanticRegistry()
	newMetrics(reg)
	registerBuildInfo(reg)
	families, err := reg.Gather()
	if err != nil {
		t.Fatal(err)
	}
	want := map[string]string{}
	for _, f := range families {
		labels := ""
		for _, l := range f.GetMetric()[0].GetLabel() {
			labels += " `" + l.GetName() + "`"
		}
		want[f.GetName()] = fmt.Sprintf("%s |%s | %s", strings.ToLower(f.GetType().String()), labels, f.GetHelp())
	}
	if diff := cmp.Diff(want, tableRows(t, "docs/metrics.md", "outbox_")); diff != "" {
		t.Errorf("docs/metrics.md differs (-registered +page):\n%s", diff)
	}
}

// tableRows returns the rows of a Markdown file's tables whose first cell is a name in backquotes
// with that prefix: the name, and the other cells as they stand.
func tableRows(t *testing.T, file, prefix string) map[string]string {
	t.Helper()
	f, err := os.Open(file)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	row := regexp.MustCompile("^\\| `(" + regexp.QuoteMeta(prefix) + "[A-Za-z0-9_]*)` \\| (.*) \\|$")
	rows := map[string]string{}
	for s := bufio.NewScanner(f); s.Scan(); {
		if m := row.FindStringSubmatch(s.Text()); m != nil {
			rows[m[1]] = m[2]
		}
	}
	return rows
}
