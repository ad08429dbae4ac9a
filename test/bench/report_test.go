package bench

import (
	"fmt"
	"io"
	"math"
	"os"
	"slices"
	"strconv"
	"strings"
	"testing"
	"text/tabwriter"
)

// goal is what a figure should reach: a ratio to the baseline or a value of its own. The zero value is
// none.
type goal struct {
	ratio, value float64
	most         bool // an upper limit, not a lower
}

// row is a line of the table: a figure beside that of another variant of its scenario.
type row struct {
	what, unit string
	figure     key
	baseline   string // variant; "" is none
	goal       goal
}

// print prints the table and the plot of what was measured.
func (r *recorder) print(t *testing.T, rows []row) {
	t.Helper()
	if err := r.table(os.Stdout, rows); err != nil {
		t.Fatal(err)
	}
	fmt.Println()
	r.plot(os.Stdout, rows)
}

// table writes a line for each row that has figures. A value is the median of the runs; a ratio is the
// median of the ratios within each run.
func (r *recorder) table(w io.Writer, rows []row) error {
	tw := tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
	fmt.Fprintln(tw, "scenario\tfigure\tvalue\tspread\tbaseline\tratio\tspread\tgoal\treached")
	for _, row := range rows {
		values := r.values[row.figure]
		v := newSpread(values)
		if v.n == 0 {
			continue
		}
		against, ratio := "", spread{}
		if row.baseline != "" {
			base := r.values[key{row.figure.scenario, row.baseline, row.figure.figure}]
			ratio = newSpread(ratios(values, base))
			against = fmt.Sprintf("%s: %s", row.baseline, number3(newSpread(base).median))
		}
		fmt.Fprintf(tw, "%s\t%s\t%s %s\t%s\t%s\t%s\t%s\t%s\t%s\n", row.figure.scenario, row.what, number3(v.median), row.unit,
			v, against, ratio.middle(), ratio, row.goal, row.goal.reached(v, ratio))
	}
	return tw.Flush()
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

// plot draws a bar for each figure and its baseline, to the scale of the longest of the same figure of
// a scenario.
func (r *recorder) plot(w io.Writer, rows []row) {
	const width = 50
	type group struct{ scenario, figure, unit string }
	var groups []group
	variants := make(map[group][]string)
	for _, row := range rows {
		g := group{row.figure.scenario, row.figure.figure, row.unit}
		if !slices.Contains(groups, g) {
			groups = append(groups, g)
		}
		for _, v := range []string{row.figure.variant, row.baseline} {
			if len(r.values[key{g.scenario, v, g.figure}]) > 0 && !slices.Contains(variants[g], v) {
				variants[g] = append(variants[g], v)
			}
		}
	}
	for _, g := range groups {
		longest := 0.0
		for _, v := range variants[g] {
			longest = max(longest, newSpread(r.values[key{g.scenario, v, g.figure}]).median)
		}
		if len(variants[g]) < 2 || longest == 0 {
			continue
		}
		fmt.Fprintf(w, "%s, %s\n", g.scenario, g.figure)
		for _, v := range variants[g] {
			median := newSpread(r.values[key{g.scenario, v, g.figure}]).median
			bar := strings.Repeat("#", max(1, int(math.Round(width*median/longest))))
			fmt.Fprintf(w, "  %-22s %s %s %s\n", v, bar, number3(median), g.unit)
		}
	}
}
