// Package bench measures the relay beside what bounds it: a floor and a relay as people write it themselves
// for the delay, a publisher without a database for the rate, writers without a trigger for theirs. `make
// bench` runs all of it; a plain `go test` the same with a handful of events, to see that it works.
//
// The servers are containers, or those of TEST_DATABASE_URL and TEST_AMQP_URL. See -h for the flags, after
// -args.
package bench

import (
	"flag"
	"fmt"
	"regexp"
	"strconv"
	"strings"
	"testing"
	"time"

	"outbox-relay/internal/testenv"
)

func TestMain(m *testing.M) { testenv.Main(m) }

var (
	full       = flag.Bool("full", false, "measure; otherwise only try that everything works")
	only       = flag.String("only", "", "regular expression: only scenarios whose names match, the optional ones too")
	runs       = flag.Int("runs", 3, "repetitions of each measurement; variants take turns")
	out        = flag.String("out", "", "file to append each measurement to, as a line of JSON")
	seconds    = flag.Int("seconds", 8, "length of a measurement of delays or writers")
	rates      = flag.String("rates", "20,200,1000", "events a second at which delays are measured")
	writers    = flag.Int("writers", 8, "sessions that write while delays are measured")
	perTx      = flag.Int("per-tx", 1, "events a transaction while delays are measured")
	payload    = flag.Int("payload", 200, "bytes of a payload")
	aggregates = flag.Int("aggregates", 1000, "aggregates that events are spread over")
	drain      = flag.Int("drain", 60_000, "events to drain")
	memory     = flag.Int("memory", 200_000, "events to drain for the relay's memory")
	settings   list
)

func init() {
	flag.Var(&settings, "set", "setting of the relay, NAME=value; may be repeated")
}

// list is a flag that may be repeated.
type list []string

func (l *list) String() string { return strings.Join(*l, " ") }

func (l *list) Set(s string) error {
	if !strings.Contains(s, "=") {
		return fmt.Errorf("want NAME=value")
	}
	*l = append(*l, s)
	return nil
}

// TestBench measures and prints. It fails only where a measurement is void: events were lost, say.
func TestBench(t *testing.T) {
	testenv.Short(t)
	if !*full {
		*runs, *seconds, *rates, *drain, *memory = 1, 1, "100", 2000, 2000
	}
	pattern, err := regexp.Compile(*only)
	if err != nil {
		t.Fatalf("-only: %v", err)
	}
	var each []int
	for _, s := range strings.Split(*rates, ",") {
		rate, err := strconv.Atoi(s)
		if err != nil || rate < 1 {
			t.Fatalf("-rates: %q is no number of events a second", s)
		}
		each = append(each, rate)
	}
	var chosen []scenario
	srv := provide(t)
	for _, s := range scenarios(srv, each) {
		if *only == "" && !s.optional || *only != "" && pattern.MatchString(s.name) {
			chosen = append(chosen, s)
		}
	}
	if len(chosen) == 0 {
		t.Fatalf("-only: no scenario matches %q", *only)
	}
	describe(t, srv)
	r := newRecorder(t, *out)
	r.run(t, chosen, *runs)
	fmt.Println()
	r.print(t, rows(each))
	fmt.Printf("\nload average now %s\n", loadAverage())
}

// scenarios returns all that can be measured. Those that take long are optional: only -only runs them.
func scenarios(srv *servers, rates []int) []scenario {
	var all []scenario
	for _, rate := range rates {
		s := scenario{name: fmt.Sprintf("delay %d/s", rate), variants: []variant{
			{"relay", delay(rate, startRelay())},
			{"floor", delay(rate, startFloor)},
		}}
		if rate <= 200 { // it keeps up with no more
			s.variants = append(s.variants, variant{"plain", delay(rate, startPlain)})
		}
		all = append(all, s)
	}
	return append(all,
		scenario{name: "drain", variants: []variant{
			{"relay", backlog(*drain, startRelay())},
			{"ceiling", ceiling(*drain)},
			{"plain", backlog(min(*drain, 2000), startPlain)},
		}},
		scenario{name: "writers", variants: []variant{
			{"no trigger", srv.write(noTrigger, nil)},
			{"doorbell", srv.write("", nil)},
			{"relay, no trigger", srv.write(noTrigger, startRelay("FALLBACK_INTERVAL=100ms"))},
			{"relay, doorbell", srv.write("", startRelay())},
			{"relay, always notify", srv.write(alwaysNotify, startRelay())},
		}},
		scenario{name: "memory", once: true, variants: []variant{{"relay", backlog(*memory, startRelay())}}},
	)
}

// rows returns what the table shows, with the goals of the project.
func rows(rates []int) []row {
	var all []row
	for _, rate := range rates {
		s := fmt.Sprintf("delay %d/s", rate)
		p50, p99 := goal{}, goal{}
		if rate <= 200 {
			p50, p99 = goal{ratio: 1.6, most: true}, goal{ratio: 3, most: true}
		}
		all = append(all,
			row{"commit to consumer, p50", "ms", key{s, "relay", "p50_ms"}, "floor", p50},
			row{"commit to consumer, p99", "ms", key{s, "relay", "p99_ms"}, "floor", p99},
			row{"the same of a plain relay, p50", "ms", key{s, "plain", "p50_ms"}, "floor", goal{}},
			row{"the same of a plain relay, p99", "ms", key{s, "plain", "p99_ms"}, "floor", goal{}})
	}
	return append(all,
		row{"drain", "events/s", key{"drain", "relay", "rate"}, "ceiling", goal{ratio: 0.95}},
		row{"the same of a plain relay", "events/s", key{"drain", "plain", "rate"}, "ceiling", goal{}},
		row{"CPU of the relay while draining", "us/event", key{"drain", "relay", "cpu_us"}, "", goal{value: 15, most: true}},
		row{"resident memory while draining", "MB", key{"memory", "relay", "rss_mb"}, "", goal{value: 40 + 16.8, most: true}},
		row{"32 writers, relay awake and idle", "tx/s", key{"writers", "doorbell", "rate"}, "no trigger", goal{ratio: 0.9}},
		row{"32 writers, relay publishing", "tx/s", key{"writers", "relay, doorbell", "rate"}, "relay, no trigger", goal{ratio: 0.9}},
		row{"the same, each commit notifies", "tx/s", key{"writers", "relay, always notify", "rate"}, "relay, no trigger", goal{}},
	)
}

// epoch is what all times are measured from.
var epoch = time.Now()

func now() time.Duration { return time.Since(epoch) }
