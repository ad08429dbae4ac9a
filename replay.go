package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/lib/pq"
	amqp "github.com/rabbitmq/amqp091-go"

	"outbox-relay/internal/serverurl"
	sqlfiles "outbox-relay/sql"
)

const (
	// replayBlocks is how many blocks of the table one statement reads: 32 MiB.
	replayBlocks = 4096
	// replayPortion is how many events are sent before their confirms are awaited, at most.
	replayPortion = 100
	// replayPatience is how long a portion may take beyond CONFIRM_TIMEOUT, writing it included.
	replayPatience = 10 * time.Second
)

// replayCommand sends published events again. It reads rows and changes none. Live traffic does not wait
// for it: it has sessions of its own on both servers, and a rate.
type replayCommand struct {
	Filter eventFilter `embed:""`
	Since  moment      `placeholder:"TIME" help:"Only events that were published since this time or later: 2026-01-31T14:00:00Z, or how long ago, like 2h."`
	Until  moment      `placeholder:"TIME" help:"Only events that were published by this time, given likewise; now by default."`
	After  int64       `placeholder:"SEQ" help:"Only events behind this place in the outbox: where an interrupted replay got to."`
	All    bool        `help:"All published events that are in the table; instead of ids and filters."`
	DryRun bool        `name:"dry-run" help:"Only say how many events are meant."`
	Yes    bool        `help:"Go ahead although more than one event is meant."`
	Rate   int         `default:"500" help:"Events a second at most."`
}

func (*replayCommand) uses(setting string) bool {
	return ofDatabase(setting) || strings.HasPrefix(setting, "AMQP_") || setting == "CONFIRM_TIMEOUT" || setting == "LOG_FORMAT"
}

func (c *replayCommand) faults() []fault {
	faults := append(rateFault(c.Rate), spanFault(c.Since, c.Until)...)
	if c.After < 0 {
		faults = append(faults, fault{"--after", fmt.Sprintf("%d is no place in the outbox", c.After)})
	}
	filtered := len(c.attrs()) > 0
	if c.All && filtered {
		faults = append(faults, fault{"--all", "given together with ids or a filter"})
	}
	if !c.All && !filtered {
		faults = append(faults, fault{"--all", "not given, and neither ids nor a filter say which events are meant"})
	}
	return faults
}

// attrs are the filter's attributes of a log line: those that ask for something.
func (c *replayCommand) attrs() []any {
	attrs := appendSet(c.Filter.attrs(), "published_since", c.Since.text())
	return appendSet(attrs, "published_until", c.Until.text())
}

func (c *replayCommand) run(ctx context.Context, cfg Config, std stdio) error {
	o, err := openOperator(ctx, cfg, "replay")
	if err != nil {
		return err
	}
	defer o.Close()
	positions, err := c.find(ctx, o, std)
	if err != nil {
		return err
	}
	switch {
	case len(positions) == 0 && len(c.Filter.IDs) > 0:
		return errors.New("nothing was sent: no published event that is still in the table has the ids given; `outbox-relay dead-letters show ID` says what became of an event")
	case len(positions) == 0:
		fmt.Fprintln(std.out, "no published event matches; what RETENTION has deleted cannot be sent again")
		return nil
	}
	first, last := positions[0], positions[len(positions)-1]
	fmt.Fprintf(std.out, "%s, from seq %d, published %s, to seq %d, published %s\n", counted(len(positions), "event"),
		first.seq, first.published.UTC().Format(time.RFC3339), last.seq, last.published.UTC().Format(time.RFC3339))
	switch {
	case c.DryRun:
		return nil
	case (len(positions) > 1 || c.All) && !c.Yes:
		return errUnconfirmed
	}

	r := &replay{cfg: cfg, o: o, rate: c.Rate}
	if r.mapper, err = newMessageMapper(cfg); err != nil {
		return err
	}
	if err := o.QueryRowContext(ctx, sqlfiles.Replay("payload type", "")).Scan(&r.payloadType); err != nil {
		return operatorError("look at the table", err)
	}
	o.audit(std, cfg, "replay", append(c.attrs(), "after", c.After, keyCount, len(positions), "exchange", cfg.AMQPExchange)...)
	err = r.work(ctx, std, positions)
	o.auditEnd(std, cfg, err, "replayed", keyCount, r.sent, "up_to_seq", r.upTo)
	if err != nil {
		goOn := fmt.Sprintf("the same command with --after=%d goes on", max(r.upTo, c.After))
		if r.sent > 0 && r.upTo == 0 { // rows from before there was a seq all have 0
			goOn = "the same command starts anew: these events are older than their numbering, --since and --until tell them apart"
		}
		return fmt.Errorf("%d of %s sent again; %s: %w", r.sent, counted(len(positions), "event"), goOn, err)
	}
	fmt.Fprintf(std.out, "%s sent again\n", counted(r.sent, "event"))
	return nil
}

// position is the place of an event in the order of its outbox.
type position struct {
	seq, created int64
	id           string
	published    time.Time
}

// find walks the table for the events that are meant, and returns them in their order.
func (c *replayCommand) find(ctx context.Context, o *operator, std stdio) (all []position, err error) {
	now, err := serverClock(ctx, o)
	if err != nil {
		return nil, err
	}
	args := append(c.Filter.args(), c.Since.before(now), c.Until.before(now))
	if until := &args[len(args)-1]; *until == nil { // events published from now on are none of ours
		*until = now
	}
	var blocks int64
	if err := o.QueryRowContext(ctx, sqlfiles.Replay("blocks", "")).Scan(&blocks); err != nil {
		return nil, operatorError("look at the table", err)
	}
	reported := time.Now()
	for block := int64(0); block < blocks; block += replayBlocks {
		here := append(args[:len(args):len(args)], fmt.Sprintf("(%d,0)", block), fmt.Sprintf("(%d,0)", block+replayBlocks))
		if all, err = c.findIn(ctx, o, here, all); err != nil {
			return nil, operatorError("look for events", err)
		}
		if time.Since(reported) >= reportEvery {
			reported = time.Now()
			fmt.Fprintf(std.err, "looked at %d %% of the table, %s so far\n", 100*block/blocks, counted(len(all), "event"))
		}
	}
	slices.SortFunc(all, func(a, b position) int {
		return cmp.Or(cmp.Compare(a.seq, b.seq), cmp.Compare(a.created, b.created), strings.Compare(a.id, b.id))
	})
	return all, nil
}

func (c *replayCommand) findIn(ctx context.Context, o *operator, args []any, all []position) ([]position, error) {
	rows, err := o.QueryContext(ctx, sqlfiles.Replay("positions", ""), args...)
	if err != nil {
		return nil, err
	}
	defer rows.Close()
	for rows.Next() {
		var p position
		if err := rows.Scan(&p.seq, &p.created, &p.id, &p.published); err != nil {
			return nil, err
		}
		if p.seq > c.After || c.After == 0 {
			all = append(all, p)
		}
	}
	return all, rows.Err()
}

// replay is one under way.
type replay struct {
	cfg         Config
	o           *operator
	mapper      *messageMapper
	payloadType string
	rate        int
	session     *amqpSession

	sent int   // confirmed
	upTo int64 // seq of the last of these
}

// work sends portion after portion. Each is confirmed before the next is sent, and the first failure ends
// it, so that the order holds over a second run from there.
func (r *replay) work(ctx context.Context, std stdio, positions []position) error {
	if err := r.connect(ctx); err != nil {
		return err
	}
	defer r.session.close()
	began, reported := time.Now(), time.Now()
	size := min(max(r.rate/changesPerSecond, 1), replayPortion)
	done := 0
	for portion := range slices.Chunk(positions, size) {
		if ctx.Err() != nil {
			return errors.New("interrupted")
		}
		if err := r.send(context.WithoutCancel(ctx), portion); err != nil {
			return err
		}
		done += len(portion)
		r.upTo = portion[len(portion)-1].seq
		if time.Since(reported) >= reportEvery {
			reported = time.Now()
			fmt.Fprintf(std.err, "%d of %s sent again, up to seq %d\n", done, counted(len(positions), "event"), r.upTo)
		}
		if done < len(positions) {
			sleep(ctx, pace(began, done, r.rate))
		}
	}
	return nil
}

// connect uses the first broker of AMQP_URL that can be used.
func (r *replay) connect(ctx context.Context) error {
	urls, err := r.cfg.amqpURLs()
	if err != nil {
		return err
	}
	cfg := r.cfg
	cfg.AMQPDeclare = false // a name that was mistyped must not become an exchange
	exchange, _ := r.mapper.staticExchange()
	var errs []error
	for _, url := range urls {
		r.session, err = dialAMQP(ctx, url, cfg, exchange, replayPortion, func(amqp.Blocking) {})
		if err == nil {
			return nil
		}
		errs = append(errs, fmt.Errorf("connect to %s: %w", serverurl.RedactAMQP(url), err))
	}
	return errors.Join(errs...)
}

// send sends a portion and waits until all of it is confirmed.
func (r *replay) send(ctx context.Context, portion []position) error {
	// A broker that raised an alarm takes nothing, for as long as it likes. Closing the socket ends any wait.
	timer := time.AfterFunc(r.cfg.ConfirmTimeout+replayPatience, func() { _ = r.session.raw.Close() })
	defer timer.Stop()
	confirms, err := r.write(ctx, portion)
	if err != nil {
		return err
	}
	for id, confirm := range confirms {
		select {
		case <-confirm.Done():
		case closed := <-r.session.main.closed:
			return fmt.Errorf("event %s: %w", id, connectionError(closed))
		}
		if !confirm.Acked() {
			return fmt.Errorf("event %s: the broker refused it, or closed the channel", id)
		}
	}
	select {
	case returned := <-r.session.main.returns: // comes before the confirm
		return fmt.Errorf("event %s: returned by the broker: %d %s (exchange %q, routing key %q)", returned.MessageId,
			returned.ReplyCode, returned.ReplyText, returned.Exchange, returned.RoutingKey)
	default:
	}
	r.sent += len(confirms)
	return nil
}

// write reads a portion's events and writes each as it comes, so that no more than one is in memory.
func (r *replay) write(ctx context.Context, portion []position) (map[string]*amqp.DeferredConfirmation, error) {
	ids := make([]string, len(portion))
	for i, p := range portion {
		ids[i] = p.id
	}
	rows, err := r.o.QueryContext(ctx, sqlfiles.Replay("events", r.payloadType), pq.Array(ids))
	if err != nil {
		return nil, operatorError("read events", err)
	}
	defer rows.Close()
	confirms := make(map[string]*amqp.DeferredConfirmation, len(ids))
	for rows.Next() {
		e := &Event{ContentType: contentTypes[r.payloadType]}
		var created *int64
		if err := rows.Scan(&e.ID, &e.Seq, &e.AggregateType, &e.AggregateID, &e.EventType, &e.Payload, &e.Headers, &e.Attempts, &created); err != nil {
			return nil, operatorError("read events", err)
		}
		if created != nil {
			e.CreatedAt = time.UnixMicro(*created)
		}
		m, err := r.mapper.message(e)
		if err != nil {
			return nil, fmt.Errorf("event %s: %w", e.ID, err)
		}
		m.publishing.Headers[headerReplay] = true
		confirms[e.ID], err = r.session.main.PublishWithDeferredConfirm(m.exchange, m.key, r.cfg.AMQPMandatory, false, m.publishing)
		if err != nil {
			return nil, fmt.Errorf("event %s: write message: %w", e.ID, err)
		}
	}
	return confirms, operatorError("read events", rows.Err())
}
