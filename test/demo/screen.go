package main

import (
	"errors"
	"fmt"
	"io"
	"os"
	"time"
)

// screen prints lines, on a terminal with some colour. Safe for concurrent use: each is one Write.
type screen struct {
	out    io.Writer
	colour bool
	opened time.Time
}

func newScreen(out *os.File) *screen {
	info, err := out.Stat()
	terminal := err == nil && info.Mode()&os.ModeCharDevice != 0
	return &screen{out: out, colour: terminal && os.Getenv("NO_COLOR") == "", opened: time.Now()}
}

const ( // SGR codes
	plain  = ""
	bold   = "1"
	yellow = "33"
	red    = "1;31"
)

func (s *screen) print(code, format string, args ...any) {
	text := fmt.Sprintf(format, args...)
	if s.colour && code != plain {
		text = "\x1b[" + code + "m" + text + "\x1b[0m"
	}
	fmt.Fprintln(s.out, text)
}

func (s *screen) note(format string, args ...any) { s.print(yellow, "       "+format, args...) }

func (s *screen) head(duration time.Duration, rate int) {
	s.opened = time.Now()
	s.print(plain, "A shop makes %d transactions a second for %v, and rolls back one in ten. Ctrl-C closes it early.\n", rate, duration)
	s.print(bold, "%5s %10s %12s %10s %11s %10s %10s", "time", "committed", "rolled back", "delivered", "duplicates", "delay p50", "p99")
}

func (s *screen) line(r report) {
	s.print(plain, "%4.0fs %10d %12d %10d %11d %10s %10s", time.Since(s.opened).Seconds(),
		r.committed, r.rolledBack, r.delivered, r.duplicates, millis(r.p50), millis(r.p99))
}

func millis(d time.Duration) string { return fmt.Sprintf("%.1f ms", d.Seconds()*1000) }

// summary says what came of it all, and returns an error if that is not what was promised. effects
// is how many events the consumer has counted in its table.
func (s *screen) summary(r report, effects int) error {
	ok := true
	row := func(name string, got, want int, text string) {
		if got == want {
			s.print(plain, "%-12s %7d  %s", name, got, text)
			return
		}
		ok = false
		s.print(red, "%-12s %7d  %s: should be %d", name, got, text, want)
	}
	s.print(plain, "")
	row("committed", r.committed, r.committed, "orders placed or changed, each with its event")
	row("rolled back", r.rolledBack, r.rolledBack, "the same, undone: no event may arrive")
	row("delivered", r.delivered, r.committed, "events of committed transactions")
	row("duplicates", r.duplicates, r.duplicates, "seen and dropped by the consumer")
	row("effects", effects, r.delivered+r.phantoms+r.others, "in the consumer's table, one an event")
	row("missing", r.missing, 0, "committed, and no event arrived")
	row("phantoms", r.phantoms, 0, "rolled back, and an event arrived")
	row("out of order", r.disorder, 0, "came after a later event of the same order")
	s.print(bold, "%-12s p50 %s, p99 %s, longest %s, from COMMIT to the consumer",
		"delay", millis(r.p50), millis(r.p99), millis(r.longest))
	switch {
	case r.committed == 0:
		return errors.New("nothing was committed")
	case !ok:
		return errors.New("not all is as promised, see above")
	}
	return nil
}
