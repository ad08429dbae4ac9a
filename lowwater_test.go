package main

import (
	"math/rand/v2"
	"testing"
)

func TestMarkMovesOnlyWhenOpenTransactionsHaveEnded(t *testing.T) {
	w := newLowWater()
	steps := []struct {
		what   string
		settle bool
		claim  Claim
		want   int64
	}{
		{what: "right after the sighting", claim: Claim{Seen: 10, Xmin: 100, Xmax: 105}, want: -1},
		{what: "before a settle: younger transactions may be open", claim: Claim{Seen: 10, Xmin: 105, Xmax: 106}, want: -1},
		{what: "while a transaction below the bound is open", settle: true, claim: Claim{Seen: 10, Xmin: 104, Xmax: 110}, want: -1},
		{what: "still open", claim: Claim{Seen: 12, Xmin: 109, Xmax: 115}, want: -1},
		{what: "after all of them ended", claim: Claim{Seen: 12, Xmin: 110, Xmax: 116}, want: 10},
	}
	for _, s := range steps {
		if s.settle {
			w.settled()
		}
		w.claimed(s.claim)
		if w.mark != s.want {
			t.Fatalf("%s: mark = %d, want %d", s.what, w.mark, s.want)
		}
	}
}

func TestMarkDoesNotPassWhatAShortClaimDidNotSee(t *testing.T) {
	w := newLowWater()
	w.claimed(Claim{Seen: 100, Xmin: 1, Xmax: 2})
	w.settled()
	w.claimed(Claim{Seen: 40, More: true, Xmin: 3, Xmax: 3}) // late rows filled the batch below 100
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
		lastEnded := int64(0)
		claim := func() {
			// As PostgreSQL has it: xmax follows the last that has ended, and younger ones are open.
			c := Claim{Xmin: lastEnded + 1, Xmax: lastEnded + 1}
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
		for range 400 {
			switch rnd.IntN(5) {
			case 0: // a transaction has its xid before its number, since it wrote before
				open = append(open, tx{nextXid, 0})
				nextXid++
			case 1:
				if len(open) > 0 {
					if o := &open[rnd.IntN(len(open))]; o.seq == 0 {
						o.seq = nextSeq
						nextSeq++
					}
				}
			case 2:
				if len(open) > 0 {
					i := rnd.IntN(len(open))
					lastEnded = max(lastEnded, open[i].xid)
					if open[i].seq > 0 {
						committed[open[i].seq] = true
					}
					if s := open[i].seq; s > 0 && s <= w.mark {
						t.Fatalf("round %d: row %d commits below the mark %d", round, open[i].seq, w.mark)
					}
					open = append(open[:i], open[i+1:]...)
				}
			case 3:
				lastEnded = nextXid
				nextXid++
				w.settled()
			case 4:
				claim()
			}
		}
	}
}
