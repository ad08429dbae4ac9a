package main

import (
	"context"
	"database/sql"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"strconv"
	"strings"
	"text/tabwriter"
	"time"

	sqlfiles "outbox-relay/sql"
)

// deadLettersCommand groups what can be done about dead letters.
type deadLettersCommand struct {
	List    deadLettersList    `cmd:"" help:"List dead letters, the latest first."`
	Show    deadLettersShow    `cmd:"" help:"Print everything about one event, its payload included."`
	Retry   deadLettersRetry   `cmd:"" help:"Have dead letters published again, with all their attempts."`
	Discard deadLettersDiscard `cmd:"" help:"Give dead letters up for good: they stay in the table, marked, and are never published."`
}

// deadLetterFilter says which dead letters a command is about.
type deadLetterFilter struct {
	Event eventFilter `embed:""`
	Error term        `placeholder:"TEXT" help:"Only events whose last error contains this text, in upper or lower case."`
	Since moment      `placeholder:"TIME" help:"Only events that are dead since this time or later: 2026-01-31T14:00:00Z, or how long ago, like 2h."`
	Until moment      `placeholder:"TIME" help:"Only events that were dead by this time, given likewise."`
}

// args are the filter's parameters of a statement. now is the time on the server's clock.
func (f deadLetterFilter) args(now time.Time) []any {
	return append(f.Event.args(), orNull(f.Error), f.Since.before(now), f.Until.before(now))
}

func (f deadLetterFilter) attrs() []any {
	attrs := appendSet(f.Event.attrs(), "error", f.Error)
	attrs = appendSet(attrs, "dead_since", f.Since.text())
	return appendSet(attrs, "dead_until", f.Until.text())
}

// serverClock is the time on the server's clock.
func serverClock(ctx context.Context, o *operator) (now time.Time, err error) {
	err = o.QueryRowContext(ctx, sqlfiles.DeadLetters("clock")).Scan(&now)
	return now, operatorError("ask for the time", err)
}

// readPlan keeps a statement about few rows among millions off the table itself, whatever the
// planner believes about them. It holds for a transaction.
const readPlan = "SET LOCAL enable_seqscan = off"

// beginDeadLetters begins a transaction for statements about dead letters. The caller ends it.
func beginDeadLetters(ctx context.Context, o *operator) (*sql.Tx, error) {
	tx, err := o.BeginTx(ctx, nil)
	if err != nil {
		return nil, operatorError("begin", err)
	}
	if _, err := tx.ExecContext(ctx, readPlan); err != nil {
		_ = tx.Rollback()
		return nil, operatorError("begin", err)
	}
	return tx, nil
}

// countDeadLetters counts those that match. args are the filter's.
func countDeadLetters(ctx context.Context, o *operator, args []any) (n int, err error) {
	tx, err := beginDeadLetters(ctx, o)
	if err != nil {
		return 0, err
	}
	defer func() { _ = tx.Rollback() }()
	err = tx.QueryRowContext(ctx, sqlfiles.DeadLetters("count"), args...).Scan(&n)
	return n, operatorError("count dead letters", err)
}

// deadLettersList prints dead letters.
type deadLettersList struct {
	Filter deadLetterFilter `embed:""`
	Limit  int              `default:"50" help:"Events printed at most; 0 for all."`
	JSON   bool             `name:"json" help:"Print an object a line instead of a table."`
}

func (*deadLettersList) uses(setting string) bool { return ofDatabase(setting) }

func (c *deadLettersList) faults() []fault {
	faults := spanFault(c.Filter.Since, c.Filter.Until)
	if c.Limit < 0 {
		faults = append(faults, fault{"--limit", fmt.Sprintf("%d is below 0", c.Limit)})
	}
	return faults
}

// deadLetter is a line of the list.
type deadLetter struct {
	ID            string `json:"id"`
	Seq           int64  `json:"seq"`
	AggregateType string `json:"aggregate_type"`
	AggregateID   string `json:"aggregate_id"`
	EventType     string `json:"event_type"`
	Attempts      int    `json:"attempts"`
	CreatedAt     string `json:"created_at"`
	DeadAt        string `json:"dead_at"`
	LastError     string `json:"last_error"`
}

func (c *deadLettersList) run(ctx context.Context, cfg Config, std stdio) error {
	o, err := openOperator(ctx, cfg, "dead-letters list")
	if err != nil {
		return err
	}
	defer o.Close()
	now, err := serverClock(ctx, o)
	if err != nil {
		return err
	}
	args := c.Filter.args(now)
	total, err := countDeadLetters(ctx, o, args)
	if err != nil {
		return err
	}
	tx, err := beginDeadLetters(ctx, o)
	if err != nil {
		return err
	}
	defer func() { _ = tx.Rollback() }()
	var limit any // no limit
	if c.Limit > 0 {
		limit = c.Limit
	}
	rows, err := tx.QueryContext(ctx, sqlfiles.DeadLetters("list"), append(args, limit)...)
	if err != nil {
		return operatorError("list dead letters", err)
	}
	defer rows.Close()
	list := newDeadLetterPrinter(std.out, c.JSON)
	for rows.Next() {
		var d deadLetter
		if err := rows.Scan(&d.ID, &d.Seq, &d.AggregateType, &d.AggregateID, &d.EventType, &d.Attempts,
			&d.CreatedAt, &d.DeadAt, &d.LastError); err != nil {
			return operatorError("list dead letters", err)
		}
		list.print(d)
	}
	if err := rows.Err(); err != nil {
		return operatorError("list dead letters", err)
	}
	return list.end(std.err, total)
}

// deadLetterPrinter prints the list as a table, or as lines of JSON.
type deadLetterPrinter struct {
	table   *tabwriter.Writer
	json    *json.Encoder // nil for a table
	printed int
}

func newDeadLetterPrinter(out io.Writer, asJSON bool) *deadLetterPrinter {
	if asJSON {
		return &deadLetterPrinter{json: json.NewEncoder(out)}
	}
	return &deadLetterPrinter{table: tabwriter.NewWriter(out, 0, 0, 2, ' ', 0)}
}

func (p *deadLetterPrinter) print(d deadLetter) {
	p.printed++
	if p.json != nil {
		_ = p.json.Encode(d)
		return
	}
	if p.printed == 1 {
		fmt.Fprintln(p.table, "ID\tAGGREGATE\tTYPE\tATTEMPTS\tDEAD SINCE\tLAST ERROR")
	}
	fmt.Fprintf(p.table, "%s\t%s %s\t%s\t%d\t%s\t%s\n", d.ID, printable(d.AggregateType), printable(d.AggregateID),
		printable(d.EventType), d.Attempts, d.DeadAt, printable(d.LastError))
}

// end says how many there are, beside the list and not in it.
func (p *deadLetterPrinter) end(messages io.Writer, total int) error {
	if p.table != nil {
		if err := p.table.Flush(); err != nil {
			return err
		}
	}
	switch {
	case total == 0:
		fmt.Fprintln(messages, "no dead letter matches")
	case p.printed < total:
		fmt.Fprintf(messages, "%d of %s; --limit=0 prints all\n", p.printed, counted(total, "dead letter"))
	default:
		fmt.Fprintln(messages, counted(total, "dead letter"))
	}
	return nil
}

// printable is inOneLine, cut short for a table.
func printable(text string) string {
	const enough = 120
	if text = inOneLine(text); len(text) > enough {
		return strings.ToValidUTF8(text[:enough], "") + "..."
	}
	return text
}

// inOneLine keeps what a row holds from moving the cursor of a terminal.
func inOneLine(text string) string {
	return strings.Map(func(r rune) rune {
		if !strconv.IsPrint(r) {
			return ' '
		}
		return r
	}, text)
}

// deadLettersShow prints one event.
type deadLettersShow struct {
	ID eventID `arg:"" name:"id" help:"Id of the event."`
}

func (*deadLettersShow) uses(setting string) bool { return ofDatabase(setting) }

func (c *deadLettersShow) run(ctx context.Context, cfg Config, std stdio) error {
	o, err := openOperator(ctx, cfg, "dead-letters show")
	if err != nil {
		return err
	}
	defer o.Close()
	var id, aggregateType, aggregateID, eventType, createdAt, payload string
	var seq, attempts int64
	var processedAt, retryAfter, deadAt, lastError, headers sql.NullString
	err = o.QueryRowContext(ctx, sqlfiles.DeadLetters("show"), string(c.ID)).Scan(&id, &seq, &aggregateType, &aggregateID, &eventType,
		&attempts, &createdAt, &processedAt, &retryAfter, &deadAt, &lastError, &headers, &payload)
	if errors.Is(err, sql.ErrNoRows) {
		return fmt.Errorf("there is no event %s in this outbox", c.ID)
	}
	if err != nil {
		return operatorError("read the event", err)
	}
	for _, line := range []struct{ name, value string }{
		{"id", id},
		{"state", stateOf(processedAt.Valid, deadAt.Valid, retryAfter.Valid)},
		{"seq", strconv.FormatInt(seq, 10)},
		{"aggregate_type", aggregateType},
		{"aggregate_id", aggregateID},
		{"event_type", eventType},
		{"attempts", strconv.FormatInt(attempts, 10)},
		{"created_at", createdAt},
		{"processed_at", processedAt.String},
		{"retry_after", retryAfter.String},
		{"dead_at", deadAt.String},
		{"last_error", lastError.String},
		{"headers", headers.String},
	} {
		fmt.Fprintf(std.out, "%-15s %s\n", line.name, inOneLine(line.value))
	}
	_, err = fmt.Fprintf(std.out, "\n%s\n", payload)
	return err
}

// stateOf says in words what the columns of an event mean.
func stateOf(processed, dead, waits bool) string {
	switch {
	case processed && dead:
		return "discarded"
	case processed:
		return "published"
	case dead:
		return "dead letter"
	case waits:
		return "waits for its retry"
	}
	return "to be published"
}
