package main

import (
	"slices"
	"sync"
	"time"
)

// tally keeps what was written and what arrived, by event id. Safe for concurrent use.
type tally struct {
	mu         sync.Mutex // guards all below
	commits    map[string]time.Time
	rollbacks  map[string]bool
	arrivals   map[string]time.Time // of the first delivery
	versions   map[int64]int        // the highest that arrived, by order
	duplicates int
	disorder   int
}

// report is a tally's state in numbers.
type report struct {
	committed, rolledBack int
	delivered             int // committed events that arrived
	duplicates            int // deliveries that were dropped
	missing               int // committed events that did not arrive
	phantoms              int // events of rolled-back transactions that arrived
	others                int // arrived, but not written by this shop
	disorder              int // came after a later event of the same order

	p50, p99, longest time.Duration // from commit to consumer
}

func newTally() *tally {
	return &tally{
		commits: map[string]time.Time{}, rollbacks: map[string]bool{},
		arrivals: map[string]time.Time{}, versions: map[int64]int{},
	}
}

// committed notes an event, and when its COMMIT had returned. By then it may have arrived.
func (t *tally) committed(id string, at time.Time) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.commits[id] = at
}

func (t *tally) rolledBack(id string) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.rollbacks[id] = true
}

// delivered notes a delivery; fresh is whether the consumer took it for new.
func (t *tally) delivered(id string, fresh bool, o order, at time.Time) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if !fresh {
		t.duplicates++
		return
	}
	t.arrivals[id] = at
	if o.Version < t.versions[o.ID] {
		t.disorder++
	}
	t.versions[o.ID] = max(o.Version, t.versions[o.ID])
}

func (t *tally) report() report {
	t.mu.Lock()
	defer t.mu.Unlock()
	r := report{
		committed: len(t.commits), rolledBack: len(t.rollbacks),
		duplicates: t.duplicates, disorder: t.disorder,
	}
	var delays []time.Duration
	for id, arrived := range t.arrivals {
		if committed, ok := t.commits[id]; ok {
			delays = append(delays, max(0, arrived.Sub(committed)))
		} else if t.rollbacks[id] {
			r.phantoms++
		} else {
			r.others++
		}
	}
	slices.Sort(delays)
	r.delivered = len(delays)
	r.missing = r.committed - r.delivered
	r.p50, r.p99, r.longest = percentile(delays, 50), percentile(delays, 99), percentile(delays, 100)
	return r
}

// percentile is the smallest of the sorted values that p percent of them do not exceed; 0 of none.
func percentile(sorted []time.Duration, p int) time.Duration {
	if len(sorted) == 0 {
		return 0
	}
	return sorted[max(0, (len(sorted)*p+99)/100-1)]
}
