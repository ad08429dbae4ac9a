package main

import "time"

// lowWater is the mark up to which the outbox is known to be dealt with, so that a claim need not
// walk over what earlier claims saw. That matters when dead entries cannot be removed from the
// index because an old snapshot is held open, and when many events wait behind a failed one.
//
// The highest seq seen is not enough: a transaction that was open then may still commit a row with
// a lower one. So the mark moves to a seq only once every transaction that was open when it
// was seen has ended, and a claim from the old mark has looked since.
//
// A snapshot does not name all open transactions: its xmax follows the last one that has ended, and
// younger ones may be open. But a settle that begins after a claim gets a transaction id above
// all of those, so the xmax of the first claim after that settle is above them too.
//
// The zero value stands below all rows. Not safe for concurrent use.
type lowWater struct {
	mark  int64      // rows with seq <= mark are dealt with; -1 for none, since old rows have seq 0
	known []sighting // in the order of seq; the last alone may be unbounded
}

// sighting: when all transactions below bound have ended, rows up to seq were seen.
type sighting struct{ seq, bound int64 }

const (
	unbounded    int64 = 0  // nothing was settled since
	boundIsNext  int64 = -1 // the next claim's xmax
	maxSightings       = 32 // bounds the list while a long transaction keeps the mark where it is
)

func newLowWater() lowWater { return lowWater{mark: -1} }

// settled takes note of a commit of our own.
func (w *lowWater) settled() {
	if n := len(w.known); n > 0 && w.known[n-1].bound == unbounded {
		w.known[n-1].bound = boundIsNext
	}
}

// claimed takes note of a claim that started at the mark or below it.
func (w *lowWater) claimed(c Claim) {
	rest := w.known[:0]
	for _, s := range w.known {
		if s.bound == boundIsNext {
			s.bound = c.Xmax
		}
		if s.bound != unbounded && s.bound <= c.Xmin && (!c.More || s.seq <= c.Seen) {
			w.mark = max(w.mark, s.seq)
		} else {
			rest = append(rest, s)
		}
	}
	w.known = rest
	if c.Seen <= max(w.mark, 0) {
		return
	}
	now := sighting{c.Seen, unbounded}
	switch n := len(w.known); {
	case n == 0:
		w.known = append(w.known, now)
	case w.known[n-1].seq >= c.Seen:
	case w.known[n-1].bound == unbounded || n == maxSightings: // it will do for both
		w.known[n-1] = now
	default:
		w.known = append(w.known, now)
	}
}

// rewind makes the next claim look at seq again, and at all after it.
func (w *lowWater) rewind(seq int64) { w.mark = min(w.mark, seq-1) }

// lookInterval is how soon after a claim everything is looked at again. A variable only so that a
// test may do without.
var lookInterval = time.Second

// lookRest is how many times as long as the last look took there is to be a rest between two at least.
const lookRest = 20

// look is a full look at the outbox, below the mark too. The mark has two gaps: a writer takes its
// seq a moment before it is seen as an open transaction, and rows are reset by hand. It may
// take several claims, each of which starts where the one before had to stop.
//
// The zero value wants no look. Not safe for concurrent use.
type look struct {
	wanted  bool
	from    int64 // rows up to it were looked at
	stale   bool  // there was a claim since the last look
	ended   time.Time
	took    time.Duration
	current time.Duration // what the look in progress took so far
}

// begin wants a full look from the start.
func (l *look) begin() { *l = look{wanted: true, from: -1, ended: l.ended, took: l.took} }

// claimed takes note of a claim that was made at began, with the mark as it was then.
func (l *look) claimed(c Claim, mark int64, began time.Time) {
	if !l.wanted {
		l.stale = l.stale || len(c.Events) > 0
		return
	}
	now := time.Now()
	l.current += now.Sub(began)
	if c.More && c.Seen < mark {
		l.from = max(l.from, c.Seen)
		return
	}
	*l = look{stale: len(c.Events) > 0, ended: now, took: l.current}
}

// due reports whether it is time for a look.
func (l *look) due() bool {
	return !l.wanted && l.stale && l.rested() && time.Since(l.ended) >= lookInterval
}

// rested reports whether enough time has passed since the last look, by its cost: with hundreds of
// thousands of events behind a failed one a look takes most of a second.
func (l *look) rested() bool { return time.Since(l.ended) >= lookRest*l.took }
