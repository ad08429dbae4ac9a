package main

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/lib/pq"

	sqlfiles "outbox-relay/sql"
)

const (
	// changesPerSecond is in how many transactions a second the --rate is divided, and maxChange
	// bounds each: few rows are locked at a time, and for milliseconds.
	changesPerSecond = 4
	maxChange        = 500
	// reportEvery is how often a command that takes long says how far it is.
	reportEvery = 2 * time.Second
	// maxAuditIDs bounds the ids in a line of the audit.
	maxAuditIDs = 100
)

// deadLetterChange is what retry and discard have in common: which dead letters, whether many are
// meant, and how fast.
type deadLetterChange struct {
	Filter deadLetterFilter `embed:""`
	All    bool             `help:"All dead letters; instead of ids and filters."`
	Yes    bool             `help:"Go ahead although more than one event is meant."`
	Rate   int              `default:"500" help:"Events a second at most."`
}

// deadLettersRetry has dead letters published again.
type deadLettersRetry struct{ deadLetterChange }

// deadLettersDiscard gives dead letters up for good.
type deadLettersDiscard struct{ deadLetterChange }

func (c *deadLettersRetry) run(ctx context.Context, cfg Config, std stdio) error {
	return c.change(ctx, cfg, std, "retry", "retried")
}

func (c *deadLettersDiscard) run(ctx context.Context, cfg Config, std stdio) error {
	return c.change(ctx, cfg, std, "discard", "discarded")
}

func (*deadLetterChange) uses(setting string) bool {
	return ofDatabase(setting) || setting == "LOG_FORMAT"
}

func (c *deadLetterChange) faults() []fault {
	faults := append(rateFault(c.Rate), spanFault(c.Filter.Since, c.Filter.Until)...)
	filtered := len(c.Filter.attrs()) > 0
	if c.All && filtered {
		faults = append(faults, fault{"--all", "given together with ids or a filter"})
	}
	if !c.All && !filtered {
		faults = append(faults, fault{"--all", "not given, and neither ids nor a filter say which dead letters are meant"})
	}
	return faults
}

// change counts what is meant, and if that is confirmed changes it in portions. Events that become
// dead letters meanwhile are left alone, so one that fails at once is not retried for ever.
func (c *deadLetterChange) change(ctx context.Context, cfg Config, std stdio, verb, done string) error {
	o, err := openOperator(ctx, cfg, "dead-letters "+verb)
	if err != nil {
		return err
	}
	defer o.Close()
	now, err := serverClock(ctx, o)
	if err != nil {
		return err
	}
	args := c.Filter.args(now)
	if until := &args[len(args)-1]; *until == nil {
		*until = now
	}
	total, err := countDeadLetters(ctx, o, args)
	if err != nil {
		return err
	}
	given := len(c.Filter.Event.IDs)
	switch {
	case total == 0 && given > 0:
		return fmt.Errorf("nothing was %s: no dead letter has the ids given; `outbox-relay dead-letters show ID` says what became of an event", done)
	case total == 0:
		fmt.Fprintln(std.out, "no dead letter matches")
		return nil
	case (total > 1 || c.All) && !c.Yes:
		fmt.Fprintf(std.out, "%s would be %s\n", counted(total, "dead letter"), done)
		return errUnconfirmed
	case total < given:
		fmt.Fprintf(std.err, "%d ids were given, and there is %s among them\n", given, counted(total, "dead letter"))
	}

	o.audit(std, cfg, "dead letters: "+verb, append(c.Filter.attrs(), keyCount, total)...)
	run := changeRun{o: o, args: args, verb: verb, done: done, total: total}
	err = run.work(ctx, std, c.Rate)
	left := 0
	for try := 0; err == nil && run.count < total; try++ {
		// What others had locked may have been done by them, or not: it is tried again from the start.
		if left, err = countDeadLetters(ctx, o, args); err != nil || left == 0 || try == lockedTries {
			break
		}
		sleep(ctx, lockedPause)
		run.after, run.total = [5]any{}, run.count+left
		err = run.work(ctx, std, c.Rate)
	}
	o.auditEnd(std, cfg, err, "dead letters "+done, keyCount, run.count, "ids", run.ids)
	if err != nil {
		return fmt.Errorf("%d of %s %s; the same command goes on with the rest: %w", run.count, counted(total, "dead letter"), done, err)
	}
	fmt.Fprintf(std.out, "%s %s\n", counted(run.count, "dead letter"), done)
	if left > 0 {
		return fmt.Errorf("%s left, locked by other sessions: repeat the command", counted(left, "dead letter"))
	}
	return nil
}

// How often, and after what pause, dead letters that others had locked are tried again.
const (
	lockedTries = 10
	lockedPause = 200 * time.Millisecond
)

// changeRun is a change under way.
type changeRun struct {
	o          *operator
	args       []any  // of the filter
	verb, done string // "retry", "retried"
	total      int    // events to change at most

	count int      // changed so far
	ids   []string // of the first of them
	after [5]any   // the place of the last one
}

// work changes portion after portion, at most rate events a second, until none is left or ctx ends.
func (r *changeRun) work(ctx context.Context, std stdio, rate int) error {
	began, reported := time.Now(), time.Now()
	size := min(max(rate/changesPerSecond, 1), maxChange)
	for r.count < r.total {
		n, err := r.portion(ctx, min(size, r.total-r.count))
		if err != nil || n == 0 {
			return err
		}
		if time.Since(reported) >= reportEvery {
			reported = time.Now()
			fmt.Fprintf(std.err, "%d of %s %s\n", r.count, counted(r.total, "dead letter"), r.done)
		}
		if r.count < r.total {
			sleep(ctx, pace(began, r.count, rate))
		}
		if ctx.Err() != nil && r.count < r.total {
			return errors.New("interrupted")
		}
	}
	return nil
}

// portion changes at most limit events in one transaction, which is not interrupted, and returns how many.
func (r *changeRun) portion(ctx context.Context, limit int) (n int, err error) {
	ctx = context.WithoutCancel(ctx)
	tx, err := beginDeadLetters(ctx, r.o)
	if err != nil {
		return 0, err
	}
	defer func() { _ = tx.Rollback() }()
	args := append(append(r.args[:len(r.args):len(r.args)], r.after[:]...), limit)
	rows, err := tx.QueryContext(ctx, sqlfiles.DeadLetters("portion"), args...)
	if err != nil {
		return 0, operatorError("find dead letters", err)
	}
	defer rows.Close()
	var ids []string
	after := r.after
	for rows.Next() {
		var aggregateType, aggregateID, createdAt, id string
		var seq int64
		if err := rows.Scan(&aggregateType, &aggregateID, &seq, &createdAt, &id); err != nil {
			return 0, operatorError("find dead letters", err)
		}
		ids = append(ids, id)
		after = [5]any{aggregateType, aggregateID, seq, createdAt, id}
	}
	if err := rows.Err(); err != nil {
		return 0, operatorError("find dead letters", err)
	}
	if len(ids) == 0 {
		return 0, nil
	}
	change := []any{pq.Array(ids)}
	if r.verb == "discard" {
		change = append(change, r.o.who())
	}
	if _, err := tx.ExecContext(ctx, sqlfiles.DeadLetters(r.verb), change...); err != nil {
		return 0, operatorError(r.verb+" dead letters", err)
	}
	if _, err := tx.ExecContext(ctx, sqlfiles.DeadLetters("release"), fmt.Sprint(r.o.table)); err != nil {
		return 0, operatorError("wake the relay", err)
	}
	if err := tx.Commit(); err != nil {
		return 0, operatorError("commit", err)
	}
	r.after = after
	r.count += len(ids)
	r.ids = append(r.ids, ids[:min(len(ids), maxAuditIDs-len(r.ids))]...)
	return len(ids), nil
}
