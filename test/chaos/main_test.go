// Package chaos breaks real servers, the links to them and the relays themselves at random under a
// continuous load, and checks after each fault that nothing was lost, nothing came out of order, and
// no event was held to account for an outage.
//
// Environment, all of it optional:
//
//	CHAOS_MINUTES  how long TestChaos runs; without it TestChaos is skipped
//	CHAOS_SEED     the seed of a run to repeat; it is printed at the start
//	CHAOS_FAULTS   a regular expression: only faults whose names match
//	CHAOS_ORDERING the relays' ORDERING; with none they work side by side, and no order is asked for
//	CHAOS_LOGS     where the logs of relays and servers are kept when something was wrong; default
//	               is a new temporary directory
package chaos

import (
	"math/rand/v2"
	"os"
	"regexp"
	"strconv"
	"testing"
	"time"

	"outbox-relay/internal/testenv"
)

func TestMain(m *testing.M) { testenv.Main(m) }

// TestChaos is the long run: random faults, now and then two at once, for CHAOS_MINUTES.
func TestChaos(t *testing.T) {
	minutes, err := strconv.ParseFloat(os.Getenv("CHAOS_MINUTES"), 64)
	if err != nil || minutes <= 0 {
		t.Skip("set CHAOS_MINUTES, or run `make chaos`")
	}
	length := time.Duration(minutes * float64(time.Minute))
	ordering := os.Getenv("CHAOS_ORDERING")
	if ordering == "" {
		ordering = "aggregate"
	}
	c := newChaos(t, seed(t), ordering, length)
	only := regexp.MustCompile(os.Getenv("CHAOS_FAULTS"))
	var all []fault
	for _, f := range faults {
		if only.MatchString(f.name) {
			all = append(all, f)
		}
	}
	if len(all) == 0 {
		t.Fatalf("CHAOS_FAULTS: no fault matches %q", only)
	}
	var deck []fault // every fault once, in a random order, then again
	draw := func() fault {
		if len(deck) == 0 {
			deck = append(deck, all...)
			c.rng.Shuffle(len(deck), func(i, j int) { deck[i], deck[j] = deck[j], deck[i] })
		}
		f := deck[0]
		deck = deck[1:]
		return f
	}
	for end := time.Now().Add(length); time.Now().Before(end) && !c.stuck; {
		f := draw()
		if c.rng.IntN(4) == 0 {
			if second := all[c.rng.IntN(len(all))]; second.hits != f.hits {
				c.round(f, second)
				continue
			}
		}
		c.round(f)
	}
	c.finish()
}

// TestShortChaos is one round each of the faults that a production meets most.
func TestShortChaos(t *testing.T) {
	t.Parallel()
	c := newChaos(t, seed(t), "aggregate", 10*time.Minute)
	for _, f := range faults {
		if f.short && !c.stuck {
			c.round(f)
		}
	}
	c.finish()
}

func seed(t *testing.T) uint64 {
	t.Helper()
	testenv.Short(t)
	s := os.Getenv("CHAOS_SEED")
	if s == "" {
		return rand.Uint64() >> 32
	}
	n, err := strconv.ParseUint(s, 10, 64)
	if err != nil {
		t.Fatalf("CHAOS_SEED: %v", err)
	}
	return n
}
