// Command demo is a small shop beside the relay. It takes orders, each with its event in one
// transaction (orders.go), consumes those events, each with one effect (consumer.go), shows both
// as they go, and says at the end what came of them (report.go).
package main

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"os/signal"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"

	_ "github.com/lib/pq"
)

const (
	readyURL     = "http://relay:9090/readyz"
	startTimeout = time.Minute      // for the relay to be ready
	lastTimeout  = 15 * time.Second // for the last events, after the last commit
	leaveUnacked = 10               // messages that the consumer does not ack before it breaks off
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	context.AfterFunc(ctx, stop) // a second Ctrl-C ends it at once
	if err := run(ctx); err != nil {
		fmt.Fprintln(os.Stderr, "demo:", err)
		os.Exit(1)
	}
}

// run keeps the shop open for DEMO_DURATION, or until ctx is done, and then waits for the last events.
func run(ctx context.Context) error {
	duration, err1 := time.ParseDuration(os.Getenv("DEMO_DURATION"))
	rate, err2 := strconv.Atoi(os.Getenv("DEMO_RATE"))
	if err1 != nil || err2 != nil || duration <= 0 || rate < 1 || rate > 1000 {
		return errors.New("DEMO_DURATION must be like 15s, DEMO_RATE 1 to 1000 transactions a second")
	}
	db, err := sql.Open("postgres", os.Getenv("DATABASE_URL"))
	if err != nil {
		return fmt.Errorf("DATABASE_URL: %w", err)
	}
	defer db.Close()
	db.SetMaxIdleConns(workers + 1)

	if err := awaitRelay(ctx); err != nil {
		return err
	}
	tally, screen := newTally(), newScreen(os.Stdout)
	consumer := &consumer{db: db, url: os.Getenv("AMQP_URL"), tally: tally, note: screen.note}
	before, err := consumer.effects(ctx)
	if err != nil {
		return err
	}

	// Only the shop ends with ctx: what it has committed is consumed after a Ctrl-C too.
	consuming, stop := context.WithCancel(context.WithoutCancel(ctx))
	var wg sync.WaitGroup
	defer wg.Wait()
	defer stop()
	ready, closed := make(chan struct{}, 1), make(chan error, 1)
	wg.Go(func() { consumer.run(consuming, ready) })
	select {
	case <-ready: // from here on events reach a queue
	case <-ctx.Done():
		return ctx.Err()
	}
	screen.head(duration, rate)
	open, cancel := context.WithTimeout(ctx, duration)
	defer cancel()
	wg.Go(func() { closed <- (&shop{db: db, tally: tally}).run(open, rate) })

	second := time.NewTicker(time.Second)
	defer second.Stop()
	crash, last := time.After(duration/2), (<-chan time.Time)(nil)
	for complete := false; !complete; {
		select {
		case <-crash:
			consumer.leaveUnacked.Store(leaveUnacked)
		case err := <-closed:
			if err != nil {
				return err
			}
			last = time.After(lastTimeout) // usually they are here already
		case <-second.C:
			r := tally.report()
			screen.line(r)
			complete = last != nil && r.missing == 0
		case <-last:
			complete = true
		}
	}
	after, err := consumer.effects(consuming)
	if err != nil {
		return err
	}
	return screen.summary(tally.report(), after-before)
}

// awaitRelay waits until the relay says that it can publish. No application needs to do that, its
// events wait in their table; here they would spoil the figures.
func awaitRelay(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, startTimeout)
	defer cancel()
	reason := "no answer"
	for {
		req, err := http.NewRequestWithContext(ctx, http.MethodGet, readyURL, nil)
		if err != nil {
			return err
		}
		if res, err := http.DefaultClient.Do(req); err == nil {
			body, _ := io.ReadAll(io.LimitReader(res.Body, 4096))
			res.Body.Close()
			if res.StatusCode == http.StatusOK {
				return nil
			}
			reason = strings.ReplaceAll(strings.TrimSpace(string(body)), "\n", "; ")
		}
		select {
		case <-ctx.Done():
			return fmt.Errorf("relay not ready: %s", reason)
		case <-time.After(100 * time.Millisecond):
		}
	}
}
