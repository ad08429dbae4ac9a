package chaos

import (
	"fmt"
	"slices"
	"strings"
	"time"

	"outbox-relay/internal/loadtest"
)

// tally sums up the rounds of one fault.
type tally struct {
	name                                         string
	pair                                         bool
	rounds, events, lost, duplicated, disordered int
	next, caughtUp                               []time.Duration
}

func (c *chaos) tally(name string, pair bool) *tally {
	if pair {
		name = "two at once"
	}
	for _, tl := range c.tallies {
		if tl.name == name {
			return tl
		}
	}
	tl := &tally{name: name, pair: pair}
	c.tallies = append(c.tallies, tl)
	return tl
}

func (tl *tally) add(v loadtest.Verdict) {
	tl.rounds++
	tl.events += v.Events
	tl.lost += len(v.Lost)
	tl.duplicated += v.Duplicated
	tl.disordered += len(v.Disordered)
}

// report prints the table, as Markdown.
func (c *chaos) report() {
	slices.SortFunc(c.tallies, func(a, b *tally) int {
		switch {
		case a.pair != b.pair && a.pair:
			return 1
		case a.pair != b.pair:
			return -1
		}
		return strings.Compare(a.name, b.name)
	})
	var b strings.Builder
	b.WriteString("\n| fault | rounds | events | lost | duplicated | out of order | next delivery, median / max | caught up, median / max |\n")
	b.WriteString("| --- | --: | --: | --: | --: | --: | --: | --: |\n")
	sum := tally{name: "all"}
	for _, tl := range c.tallies {
		tl.line(&b)
		sum.rounds += tl.rounds
		sum.events += tl.events
		sum.lost += tl.lost
		sum.duplicated += tl.duplicated
		sum.disordered += tl.disordered
		sum.next = append(sum.next, tl.next...)
		sum.caughtUp = append(sum.caughtUp, tl.caughtUp...)
	}
	sum.line(&b)
	fmt.Println(b.String())
	fmt.Printf("seed %d, %v, %d events rolled back, %d of the writers' transactions failed in outages\n",
		c.seed, time.Since(c.began).Round(time.Second), c.load.RolledBack(), c.load.Failed())
}

func (tl *tally) line(b *strings.Builder) {
	fmt.Fprintf(b, "| %s | %d | %d | %d | %d | %d | %s | %s |\n", tl.name, tl.rounds, tl.events, tl.lost,
		tl.duplicated, tl.disordered, spread(tl.next), spread(tl.caughtUp))
}

func spread(ds []time.Duration) string {
	if len(ds) == 0 {
		return "-"
	}
	ds = slices.Sorted(slices.Values(ds))
	return fmt.Sprintf("%v / %v", round(ds[(len(ds)-1)/2]), round(ds[len(ds)-1]))
}

// round leaves as many digits as are of interest.
func round(d time.Duration) time.Duration {
	if d < time.Second {
		return d.Round(time.Millisecond)
	}
	return d.Round(10 * time.Millisecond)
}
