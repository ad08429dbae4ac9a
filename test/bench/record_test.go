package bench

import (
	"encoding/json"
	"fmt"
	"maps"
	"math"
	"os"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/schollz/progressbar/v3"
)

// figures are the results of one measurement, by name.
type figures map[string]float64

// measure measures once. It fails the test if the result would be void.
type measure func(t *testing.T) figures

// variant is one way to do what a scenario does.
type variant struct {
	name    string
	measure measure
}

// scenario holds what is compared with each other. Its variants take turns, so that noise hits all.
type scenario struct {
	name     string
	optional bool // only when asked for by name
	once     bool // not repeated
	variants []variant
	rows     []row // of the table
}

// key names a figure.
type key struct{ scenario, variant, figure string }

// recorder keeps the figures.
type recorder struct {
	values map[key][]float64 // by run; NaN where it was void
	lines  *json.Encoder     // nil without -out
}

func newRecorder(t *testing.T, path string) *recorder {
	t.Helper()
	r := &recorder{values: make(map[key][]float64)}
	if path != "" {
		f, err := os.OpenFile(path, os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o644)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = f.Close() })
		r.lines = json.NewEncoder(f)
	}
	return r
}

// run measures everything, so many times.
func (r *recorder) run(t *testing.T, scenarios []scenario, runs int) {
	t.Helper()
	type one struct {
		scenario
		variant
		run int
	}
	var all []one
	for run := range runs {
		for _, s := range scenarios {
			for _, v := range s.variants {
				if !s.once || run == 0 {
					all = append(all, one{s, v, run})
				}
			}
		}
	}
	bar := newBar(len(all))
	for i, m := range all {
		_ = bar.Clear()
		bar.Describe(m.scenario.name + ", " + m.variant.name)
		var got figures
		t.Run(fmt.Sprintf("%s, %s, %d", m.scenario.name, m.variant.name, m.run+1), func(t *testing.T) {
			got = m.measure(t)
			if t.Failed() {
				got = nil
			}
		})
		_ = bar.Clear()
		fmt.Printf("%3d of %d  %-12s %-21s %s\n", i+1, len(all), m.scenario.name, m.variant.name, got)
		_ = bar.Add(1)
		r.note(t, key{scenario: m.scenario.name, variant: m.variant.name}, m.run, got)
	}
	_ = bar.Clear()
}

// newBar makes a bar for so many measurements, which is seen on a terminal only: elsewhere the lines
// say enough.
func newBar(measurements int) *progressbar.ProgressBar {
	info, err := os.Stdout.Stat()
	return progressbar.NewOptions(measurements,
		progressbar.OptionSetVisibility(err == nil && info.Mode()&os.ModeCharDevice != 0),
		progressbar.OptionSetWriter(os.Stdout), progressbar.OptionShowCount(), progressbar.OptionSetWidth(30),
		progressbar.OptionSetPredictTime(true), progressbar.OptionSetElapsedTime(true))
}

func (r *recorder) note(t *testing.T, k key, run int, got figures) {
	t.Helper()
	for name, value := range got {
		k.figure = name
		for len(r.values[k]) < run { // void ones before it
			r.values[k] = append(r.values[k], math.NaN())
		}
		r.values[k] = append(r.values[k], value)
	}
	if r.lines == nil {
		return
	}
	err := r.lines.Encode(map[string]any{
		"time": time.Now().UTC().Format(time.RFC3339), "scenario": k.scenario, "variant": k.variant, "run": run + 1,
		"void": got == nil, "figures": got, "load": loadAverage(),
	})
	if err != nil {
		t.Fatal(err)
	}
}

func (f figures) String() string {
	if f == nil {
		return "void"
	}
	var parts []string
	for _, name := range slices.Sorted(maps.Keys(f)) {
		parts = append(parts, name+" "+number3(f[name]))
	}
	return strings.Join(parts, "  ")
}

// percentile returns the p-th percentile of sorted values, by the nearest rank.
func percentile(sorted []float64, p float64) float64 {
	return sorted[max(0, int(math.Ceil(p/100*float64(len(sorted))))-1)]
}
