package bench

import (
	"fmt"
	"io"
	"math"
	"slices"
	"strconv"
	"strings"
	"text/tabwriter"
)

// goal is what a figure should reach: a ratio to the baseline or a value of its own. The zero value is
// none.
type goal struct {
	ratio, value float64
	most         bool // an upper limit, not a lower
}

// row is a line of the table: a figure of a variant, beside that of another.
type row struct {
	what, unit string
	figure     string
	variant    string
	baseline   string // "" is none
	goal       goal
}

// table writes a line for each row that has figures. A value is the median of the runs; a ratio is the
// median of the ratios within each run.
func (r *recorder) table(w io.Writer, scenarios []scenario) error {
	var missed []string
	tw := tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
	fmt.Fprintln(tw, "scenario\tfigure\tvalue\tspread\tbaseline\tratio\tspread\tgoal\treached")
	for _, s := range scenarios {
		for _, row := range s.rows {
			values := r.values[key{s.name, row.variant, row.figure}]
			value := newSpread(values)
			if value.n == 0 {
				continue
			}
			against, ratio := "", spread{}
			if row.baseline != "" && row.baseline != row.variant {
				base := r.values[key{s.name, row.baseline, row.figure}]
				ratio = newSpread(ratios(values, base))
				against = row.baseline + ": " + newSpread(base).middle()
			}
			reached := row.goal.reached(value, ratio)
			if reached == "no" {
				missed = append(missed, s.name+": "+row.what)
			}
			fmt.Fprintf(tw, "%s\t%s\t%s %s\t%s\t%s\t%s\t%s\t%s\t%s\n", s.name, row.what, value.middle(), row.unit, value,
				against, ratio.middle(), ratio, row.goal, reached)
		}
	}
	if err := tw.Flush(); err != nil || len(missed) == 0 {
		return err
	}
	_, err := fmt.Fprintf(w, "\nnot reached: %s\nwhy, by profiles, and what was tried: docs/benchmarks.md, \"What keeps the missed goals away\"\n", strings.Join(missed, "; "))
	return err
}

// spread sums up the runs of a figure.
type spread struct {
	median, low, high float64
	n                 int
}

// newSpread leaves out what is not a number.
func newSpread(values []float64) spread {
	values = slices.DeleteFunc(slices.Clone(values), math.IsNaN)
	if len(values) == 0 {
		return spread{}
	}
	slices.Sort(values)
	half := len(values) / 2
	median := values[half]
	if len(values)%2 == 0 {
		median = (median + values[half-1]) / 2
	}
	return spread{median, values[0], values[len(values)-1], len(values)}
}

func (s spread) String() string {
	if s.n == 0 {
		return ""
	}
	return number3(s.low) + ".." + number3(s.high)
}

func (s spread) middle() string {
	if s.n == 0 {
		return ""
	}
	return number3(s.median)
}

// ratios divides run by run.
func ratios(values, base []float64) []float64 {
	var all []float64
	for i := range min(len(values), len(base)) {
		all = append(all, values[i]/base[i])
	}
	return all
}

func (g goal) String() string {
	limit := "at least "
	if g.most {
		limit = "at most "
	}
	switch {
	case g.ratio != 0:
		return limit + number3(g.ratio) + " x"
	case g.value != 0:
		return limit + number3(g.value)
	}
	return ""
}

func (g goal) reached(value, ratio spread) string {
	got, want := value, g.value
	if g.ratio != 0 {
		got, want = ratio, g.ratio
	}
	switch {
	case want == 0 || got.n == 0:
		return ""
	case g.most == (got.median <= want) || got.median == want:
		return "yes"
	}
	return "no"
}

// number3 prints three digits, or all before the point.
func number3(v float64) string {
	digits := 2
	for limit := 10.0; digits > 0 && math.Abs(v) >= limit; limit *= 10 {
		digits--
	}
	return strconv.FormatFloat(v, 'f', digits, 64)
}

// plot draws what the table compares: a bar for each variant, to the scale of the longest.
func (r *recorder) plot(w io.Writer, scenarios []scenario) {
	const width = 50
	for _, s := range scenarios {
		var drawn []string
		for _, row := range s.rows {
			if row.baseline == "" || slices.Contains(drawn, row.figure) {
				continue
			}
			drawn = append(drawn, row.figure)
			longest := 0.0
			for _, v := range s.variants {
				longest = max(longest, newSpread(r.values[key{s.name, v.name, row.figure}]).median)
			}
			fmt.Fprintf(w, "\n%s, %s, %s\n", s.name, row.figure, row.unit)
			for _, v := range s.variants {
				if value := newSpread(r.values[key{s.name, v.name, row.figure}]); value.n > 0 {
					bar := strings.Repeat("#", max(1, int(math.Round(width*value.median/longest))))
					fmt.Fprintf(w, "  %-21s %s %s\n", v.name, bar, value.middle())
				}
			}
		}
	}
}
