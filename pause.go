package main

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"io"
	"time"

	sqlfiles "outbox-relay/sql"
)

const (
	// obeyPatience is how long a relay may take to obey: it looks once a second, and what is in
	// flight has CONFIRM_TIMEOUT to be confirmed.
	obeyPatience = 15 * time.Second
	obeyPoll     = 50 * time.Millisecond
	// maxPauseReason bounds --reason, in bytes.
	maxPauseReason = 500
)

// pauseCommand makes every relay stop to publish, and resumeCommand lets them go on.
type (
	pauseCommand struct {
		Reason string `name:"reason" help:"Why, for others to read in status."`
	}
	resumeCommand struct{}
)

func (pauseCommand) uses(setting string) bool { return ofDatabase(setting) || setting == "LOG_FORMAT" }

func (resumeCommand) uses(setting string) bool { return ofDatabase(setting) || setting == "LOG_FORMAT" }

func (c pauseCommand) faults() []fault {
	if len(c.Reason) > maxPauseReason {
		return []fault{{"--reason", fmt.Sprintf("over %d bytes", maxPauseReason)}}
	}
	return nil
}

func (c pauseCommand) run(ctx context.Context, cfg Config, std stdio) error {
	o, err := openOperator(ctx, cfg, "pause")
	if err != nil {
		return err
	}
	defer o.Close()
	by := o.who()
	if c.Reason != "" {
		by += ": " + oneLine(c.Reason)
	}
	var since sql.NullTime
	var before string
	switch err := o.QueryRowContext(ctx, sqlfiles.Status("pause"), by, c.Reason != "").Scan(&since, &before); {
	case err != nil:
		return operatorError("pause", err)
	case !since.Valid:
		o.audit(std, cfg, "outbox paused", keyReason, c.Reason)
	case c.Reason != "":
		fmt.Fprintf(std.out, "already paused since %s by %s; the reason is yours now\n", since.Time.UTC().Format(time.RFC3339), before)
		o.audit(std, cfg, "reason of the pause replaced", keyReason, c.Reason, "paused_at", since.Time, "paused_by", before)
	default:
		fmt.Fprintf(std.out, "already paused since %s by %s\n", since.Time.UTC().Format(time.RFC3339), before)
	}
	return o.awaitObedience(ctx, true, std.out)
}

func (resumeCommand) run(ctx context.Context, cfg Config, std stdio) error {
	o, err := openOperator(ctx, cfg, "resume")
	if err != nil {
		return err
	}
	defer o.Close()
	var since time.Time
	var by string
	err = o.QueryRowContext(ctx, sqlfiles.Status("resume")).Scan(&since, &by, new(any))
	switch {
	case errors.Is(err, sql.ErrNoRows):
		fmt.Fprintln(std.out, "not paused: nothing to do")
		return nil
	case err != nil:
		return operatorError("resume", err)
	}
	o.audit(std, cfg, "outbox resumed", "paused_at", since, "paused_by", by)
	return o.awaitObedience(ctx, false, std.out)
}

// awaitObedience waits until every relay that works shows that it is paused, or is not, and says so.
func (o *operator) awaitObedience(ctx context.Context, paused bool, w io.Writer) error {
	said := map[bool]string{true: "paused", false: "resumed"}[paused]
	for deadline := time.Now().Add(obeyPatience); ; {
		relays, err := readRelays(ctx, o, o.table)
		if err != nil {
			return operatorError("see whether the relays obey", err)
		}
		working := 0
		var late *RelayStatus
		for i, r := range relays {
			if r.Works {
				working++
			}
			if r.Works && r.Paused != paused {
				late = &relays[i]
			}
		}
		switch {
		case working == 0:
			fmt.Fprintf(w, "%s; no relay works at present, and the next one will obey\n", said)
			return nil
		case late == nil:
			fmt.Fprintf(w, "%s; relays that obey: %d\n", said, working)
			return nil
		case time.Now().After(deadline):
			return fmt.Errorf("%s in the database, but the relay with pid %d has not obeyed within %v: "+
				"it may be frozen, be too old, or still wait for confirms of what it has sent: see `outbox-relay status`", said, late.PID, obeyPatience)
		}
		if sleep(ctx, obeyPoll); ctx.Err() != nil {
			return fmt.Errorf("%s in the database; interrupted before all relays obeyed", said)
		}
	}
}
