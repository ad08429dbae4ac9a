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
	"os"
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
	out        = flag.String("out", "", "absolute path of a file to append each measurement to, as a line of JSON")
	seconds    = flag.Int("seconds", 6, "length of a measurement of delays or writers")
	rates      = flag.String("rates", "20,200,1000", "events a second at which delays are measured")
	writers    = flag.Int("writers", 8, "sessions that write while delays are measured")
	perTx      = flag.Int("per-tx", 1, "events a transaction while delays are measured")
	payload    = flag.Int("payload", 200, "bytes of a payload")
	aggregates = flag.Int("aggregates", 1000, "aggregates that events are spread over")
	drain      = flag.Int("drain", 60_000, "events to drain")
	memory     = flag.Int("memory", 200_000, "events to drain for the relay's memory")
	rows       = flag.Int("rows", 5_000_000, "processed rows of a big table")
	against    = flag.String("against", "", "absolute path of another build of the relay, to compare with")
	settings   list // of the relay
	parameters list // of PostgreSQL
)

func init() {
	flag.Var(&settings, "set", "setting of the relay, NAME=value; may be repeated")
	flag.Var(&parameters, "pg", "parameter of PostgreSQL, name=value, unless it is given; may be repeated. Slow commits: commit_delay=5000 and commit_siblings=0")
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
		*runs, *seconds, *rates, *drain, *memory, *rows = 1, 1, "100", 2000, 2000, 10_000
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
	if err := r.table(os.Stdout, chosen); err != nil {
		t.Fatal(err)
	}
	r.plot(os.Stdout, chosen)
	fmt.Printf("\nload average now %s\n", loadAverage())
}

// epoch is what all times are measured from.
var epoch = time.Now()

func now() time.Duration { return time.Since(epoch) }
