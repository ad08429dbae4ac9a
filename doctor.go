package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"strings"
	"time"

	"github.com/lib/pq"
	"github.com/lib/pq/pqerror"
)

// doctorTimeout bounds all checks together.
const doctorTimeout = time.Minute

// errFaults: doctor has found faults, and has told them.
var errFaults = errors.New("doctor: there are faults")

// doctorCommand checks the whole installation.
type doctorCommand struct {
	JSON bool `name:"json" help:"Print a JSON object instead of lines."`
}

func (doctorCommand) uses(string) bool { return true }

func (c doctorCommand) run(ctx context.Context, cfg Config, std stdio) error {
	ctx, cancel := context.WithTimeout(ctx, doctorTimeout)
	defer cancel()
	d := &doctor{cfg: cfg, live: std.out}
	if c.JSON {
		d.live = io.Discard
	}
	d.checkSettings(std.environ)
	d.checkPostgres(ctx)
	d.checkRabbitMQ(ctx)
	if ctx.Err() != nil {
		return fmt.Errorf("doctor: not finished: %w", ctx.Err())
	}
	if c.JSON {
		if err := json.NewEncoder(std.out).Encode(d.report()); err != nil {
			return err
		}
	}
	if d.report().Faults > 0 {
		return errFaults
	}
	return nil
}

// doctor collects findings. Not safe for concurrent use.
type doctor struct {
	cfg      Config
	live     io.Writer // findings as they come
	findings []Finding
	returned returnedEvents
}

// Level says how bad a finding is.
type Level string

const (
	LevelOK      Level = "ok"
	LevelWarning Level = "warning" // works, and may not be meant
	LevelFault   Level = "fault"   // events are not published, or not as promised
	LevelUnknown Level = "unknown" // could not be checked
)

// Finding is what one check came to. The names in JSON are documented in docs/commands.md.
type Finding struct {
	Check string `json:"check"` // a short, stable name
	Level Level  `json:"level"`
	Text  string `json:"text"`
	Mend  string `json:"mend"` // what to type or to change; empty when all is well
}

// Report is all of them.
type Report struct {
	Faults   int       `json:"faults"`
	Warnings int       `json:"warnings"`
	Findings []Finding `json:"findings"`
}

func (d *doctor) report() Report {
	r := Report{Findings: d.findings}
	for _, f := range d.findings {
		switch f.Level {
		case LevelFault:
			r.Faults++
		case LevelWarning:
			r.Warnings++
		}
	}
	return r
}

func (d *doctor) add(level Level, check, mend, text string) {
	f := Finding{check, level, strings.Join(strings.Fields(text), " "), mend}
	d.findings = append(d.findings, f)
	line := fmt.Sprintf("%-8s %-12s %s", f.Level, f.Check, f.Text)
	if mend != "" {
		line += " -> " + mend
	}
	fmt.Fprintln(d.live, line)
}

func (d *doctor) ok(check, format string, args ...any) {
	d.add(LevelOK, check, "", fmt.Sprintf(format, args...))
}

func (d *doctor) warning(check, mend, format string, args ...any) {
	d.add(LevelWarning, check, mend, fmt.Sprintf(format, args...))
}

func (d *doctor) fault(check, mend, format string, args ...any) {
	d.add(LevelFault, check, mend, fmt.Sprintf(format, args...))
}

func (d *doctor) unknown(check, mend, format string, args ...any) {
	d.add(LevelUnknown, check, mend, fmt.Sprintf(format, args...))
}

// failed takes note of a check that could not be made although its server answers.
func (d *doctor) failed(check string, err error) {
	if pq.As(err, pqerror.InsufficientPrivilege) != nil {
		d.unknown(check, "see the finding on rights", "could not be checked for want of a right: %v", err)
		return
	}
	d.unknown(check, "", "%v", operatorError("could not be checked", err))
}
