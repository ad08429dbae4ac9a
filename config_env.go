package main

import (
	"fmt"
	"regexp"
	"slices"
	"strings"
)

// unknownVariables points out variables that look like settings but are none, most likely slips
// of the pen. A hint only: the environment may hold anything.
func unknownVariables(environ []string) (hints []string) {
	var names []string
	for _, s := range (Config{}).settings() {
		names = append(names, s.name)
	}
	for name := range environMap(environ) {
		if slices.Contains(names, name) || ofPlatform.MatchString(name) {
			continue
		}
		if near := nearest(name, names); near != "" {
			hints = append(hints, fmt.Sprintf("unknown variable %s: did you mean %s?", name, near))
		} else if ours.MatchString(name) {
			hints = append(hints, fmt.Sprintf("unknown variable %s: there is no such setting", name))
		}
	}
	slices.Sort(hints)
	return hints
}

var (
	// ours matches names that nothing else is likely to use beside a relay.
	ours = regexp.MustCompile(`^(AMQP|OUTBOX|RETRY|RETENTION|BATCH|CONFIRM|AGGREGATE|FALLBACK|DATABASE_URL)_`)

	// ofPlatform matches what Kubernetes and Docker set for a service that is called amqp or outbox.
	ofPlatform = regexp.MustCompile(`_SERVICE_(HOST|PORT)(_|$)|_PORT$|_PORT_\d+_(TCP|UDP|SCTP)(_|$)|_ENV_|^[A-Z]+_NAME$`)

	// prefixed matches what people put before names to keep applications apart.
	prefixed = regexp.MustCompile(`^(OUTBOX_RELAY|OUTBOX|RELAY)_`)
)

// nearest returns the one of names that was most likely meant, or nothing.
func nearest(name string, names []string) string {
	plain := func(s string) string { return strings.ReplaceAll(strings.ToUpper(s), "_", "") }
	got := plain(prefixed.ReplaceAllString(strings.ToUpper(name), ""))
	best, bestDistance := "", 3 // one slip or two; more is another word
	for _, n := range names {
		if d := distance(got, plain(n)); d < bestDistance && 4*d <= len(got) {
			best, bestDistance = n, d
		}
	}
	return best
}

// distance is the number of letters to insert, remove, replace or swap with the next one to get
// from a to b (optimal string alignment).
func distance(a, b string) int {
	before, prev := make([]int, len(b)+1), make([]int, len(b)+1)
	for j := range prev {
		prev[j] = j
	}
	for i := 1; i <= len(a); i++ {
		row := make([]int, len(b)+1)
		row[0] = i
		for j := 1; j <= len(b); j++ {
			replace := prev[j-1]
			if a[i-1] != b[j-1] {
				replace++
			}
			row[j] = min(prev[j]+1, row[j-1]+1, replace)
			if i > 1 && j > 1 && a[i-1] == b[j-2] && a[i-2] == b[j-1] {
				row[j] = min(row[j], before[j-2]+1)
			}
		}
		before, prev = prev, row
	}
	return prev[len(b)]
}
