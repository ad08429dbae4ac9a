package main

import (
	"math/rand/v2"
	"testing"
)

func TestMarkMovesOnlyWhenOpenTransactionsHaveEnded(t *testing.T) {
	w := newLowWater()
	w.claimed(Claim{Seen: 10, Xmin: 100, Xmax: 105}) // 100..104 may still commit rows below 10
	if w.mark != -1 {
		t.Fatalf("mark = %d right after the sighting, want -1", w.mark)
	}
	w.claimed(Claim{Seen: 10, Xmin: 104, Xmax: 110})
	if w.mark != -1 {
		t.Fatalf("mark = %d while a transaction of the sighting is open, want -1", w.mark)
	}
	w.claimed(Claim{Seen: 12, Xmin: 105, Xmax: 112})
	if w.mark != 10 {
		t.Fatalf("mark = %d after all transactions of the sighting ended, want 10", w.mark)
	}
}

func TestMarkDoesNotPassWhatAShortClaimDidNotSee(t *testing.T) {
	w := newLowWater()
	w.claimed(Claim{Seen: 100, Xmin: 1, Xmax: 2})
	w.claimed(Claim{Seen: 40, More: true, Xmin: 2, Xmax: 3}) // late rows filled the batch below 100
	if w.mark != -1 {
		t.Errorf("mark = %d, want -1: rows between 40 and 100 were not looked at again", w.mark)
	}
	w.claimed(Claim{Seen: 100, Xmin: 3, Xmax: 4})
	if w.mark != 100 {
		t.Errorf("mark = %d, want 100", w.mark)
	}
}

func TestRewindMakesTheClaimLookAgain(t *testing.T) {
	w := lowWater{mark: 50}
	w.rewind(20)
	if w.mark != 19 {
		t.Errorf("mark = %d, want 19", w.mark)
	}
	w.rewind(30)
	if w.mark != 19 {
		t.Errorf("mark = %d, want 19: a rewind never moves forward", w.mark)
	}
}

// Random writers take numbers, commit in another order, and a claim sees what has committed. No
// row may ever be committed at or below the mark without having been claimed.
func TestMarkNeverPassesARowThatCommitsLate(t *testing.T) {
	for round := range 300 {
		rnd := rand.New(rand.NewPCG(uint64(round), 7))
		type tx struct{ xid, seq int64 }
		var open []tx
		committed, claimed := map[int64]bool{}, map[int64]bool{}
		w := newLowWater()
		nextXid, nextSeq := int64(1), int64(1)
		claim := func() {
			c := Claim{Xmin: nextXid, Xmax: nextXid}
			for _, o := range open {
				c.Xmin = min(c.Xmin, o.xid)
			}
			limit := 1 + rnd.IntN(4)
			for seq := w.mark + 1; seq < nextSeq; seq++ {
				if !committed[seq] || claimed[seq] {
					continue
				}
				if limit == 0 {
					c.More = true
					break
				}
				claimed[seq], c.Seen = true, seq
				limit--
			}
			if !c.More {
				for seq := range committed {
					if seq > w.mark {
						c.Seen = max(c.Seen, seq)
					}
				}
			}
			w.claimed(c)
		}
		for range 200 {
			switch rnd.IntN(3) {
			case 0: // the xid is older than the number, as for a transaction that wrote before
				open = append(open, tx{nextXid, nextSeq})
				nextXid++
				nextSeq++
			case 1:
				if len(open) > 0 {
					i := rnd.IntN(len(open))
					committed[open[i].seq] = true
					if open[i].seq <= w.mark {
						t.Fatalf("round %d: row %d commits below the mark %d", round, open[i].seq, w.mark)
					}
					open = append(open[:i], open[i+1:]...)
				}
			case 2:
				claim()
			}
		}
	}
}
