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
	all, done := 0, 0
	for _, s := range scenarios {
		n := runs
		if s.once {
			n = 1
		}
		all += n * len(s.variants)
	}
	for run := range runs {
		for _, s := range scenarios {
			if s.once && run > 0 {
				continue
			}
			for _, v := range s.variants {
				var got figures
				t.Run(fmt.Sprintf("%s, %s, %d", s.name, v.name, run+1), func(t *testing.T) {
					got = v.measure(t)
					if t.Failed() {
						got = nil
					}
				})
				done++
				fmt.Printf("%3d of %d  %-12s %-22s %s\n", done, all, s.name, v.name, got)
				r.note(t, s, v, run, got)
			}
		}
	}
}

func (r *recorder) note(t *testing.T, s scenario, v variant, run int, got figures) {
	t.Helper()
	for name, value := range got {
		k := key{s.name, v.name, name}
		for len(r.values[k]) < run { // void ones before it
			r.values[k] = append(r.values[k], math.NaN())
		}
		r.values[k] = append(r.values[k], value)
	}
	if r.lines == nil {
		return
	}
	err := r.lines.Encode(map[string]any{
		"time": time.Now().UTC().Format(time.RFC3339), "scenario": s.name, "variant": v.name, "run": run + 1,
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
