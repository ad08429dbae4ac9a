package main

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"log/slog"
	"strconv"
	"sync"
	"sync/atomic"
	"time"

	"github.com/cenkalti/backoff/v5"
	"github.com/lib/pq"

	"outbox-relay/internal/boundedconn"
	sqlfiles "outbox-relay/sql"
)

const (
	// pingInterval keeps middle boxes from forgetting an idle LISTEN session, and listenTimeout,
	// the longest silence of its server, finds out when one did.
	pingInterval  = 10 * time.Second
	listenTimeout = 25 * time.Second
	// listenCloseTimeout is how long closing may take; pq waits for a dial in progress.
	listenCloseTimeout = time.Second
)

// Bell is a one-slot wake-up: rings while its owner is busy fold into one. Ring never blocks and
// is safe from any goroutine. Make it with NewBell.
type Bell chan struct{}

// NewBell makes a bell that was not rung yet.
func NewBell() Bell { return make(Bell, 1) }

// Ring wakes the owner, now or when it next waits.
func (b Bell) Ring() {
	select {
	case b <- struct{}{}:
	default: // already rung
	}
}

// Listener hears the trigger's notifications and rings a bell. A notification is a hint that
// there may be events and carries nothing. It knows nothing of rows.
//
// lib/pq's listener reconnects by itself, but with the password it was made with and without a
// limit for how long a call may take: it is replaced whole when a connection attempt fails, and
// its connection is bounded from below.
type Listener struct {
	cfg         Config
	log         *slog.Logger
	metrics     *Metrics
	notified    Bell // a notification came
	reconnected Bell // notifications may have been lost
	probe       string
	table       atomic.Uint32 // whose notifications count; 0: all
	rings       atomic.Uint64
	heard       atomic.Int64 // when the last probe came, as monotonic nanoseconds since start
	anew        Bell         // asks for another connection
}

// NewListener makes a listener that rings notified for notifications and reconnected when some
// may have been missed.
func NewListener(cfg Config, log *slog.Logger, m *Metrics, notified, reconnected Bell) *Listener {
	return &Listener{
		cfg: cfg, log: log.With(keyServer, PeerListener), metrics: m,
		notified: notified, reconnected: reconnected, anew: NewBell(), probe: "outbox_probe_" + rand.Text(),
	}
}

// ProbeChannel is a channel only this listener listens on.
func (l *Listener) ProbeChannel() string { return l.probe }

// Rings is how many notifications came so far. Safe for any goroutine.
func (l *Listener) Rings() uint64 { return l.rings.Load() }

// Heard reports when the last notification on ProbeChannel came; the zero time if none ever did.
func (l *Listener) Heard() time.Time {
	if n := l.heard.Load(); n != 0 {
		return start.Add(time.Duration(n))
	}
	return time.Time{}
}

// Heed makes the listener ignore what other outboxes of the same database notify. Safe for any goroutine.
func (l *Listener) Heed(table uint32) { l.table.Store(table) }

// concerns reports whether a notification is about our table: any other payload than the number of another
// table may be.
func (l *Listener) concerns(payload string) bool {
	table := l.table.Load()
	other, err := strconv.ParseUint(payload, 10, 32)
	return table == 0 || err != nil || uint32(other) == table
}

// Reconnect gives the connection up for another. Safe for any goroutine; it does not wait.
func (l *Listener) Reconnect() { l.anew.Ring() }

// errDeaf: notifications do not come over this connection.
var errDeaf = errors.New("notifications do not arrive over this connection: trying another")

// Run listens until ctx is done. It returns within about a second of that whatever state the
// connection is in.
func (l *Listener) Run(ctx context.Context) {
	pause := backoff.NewExponentialBackOff()
	pause.InitialInterval, pause.MaxInterval = reconnectMin, reconnectMax
	failures := &repeatLog{log: l.log, what: "listen for notifications"}
	for ctx.Err() == nil {
		err := l.listen(ctx, func() {
			pause.Reset()
			failures.OK()
		})
		set01(l.metrics.Connected[PeerListener], false)
		if ctx.Err() != nil {
			return
		}
		l.metrics.ConnectionFailures[PeerListener].Inc()
		failures.Failed(err)
		sleep(ctx, pause.NextBackOff())
	}
}

// listen makes one pq.Listener and serves it until ctx is done or it cannot connect.
func (l *Listener) listen(ctx context.Context, onListening func()) error {
	dsn, err := l.cfg.databaseDSN()
	if err != nil {
		return err
	}
	select {
	case <-l.anew: // asked of a connection before
	default:
	}
	failed := make(chan error, 1) // the first failure; later ones have nobody to tell
	fail := func(err error) {
		select {
		case failed <- err:
		default:
		}
	}
	dialer := boundedconn.Dialer{ConnectTimeout: connectTimeout, ReadTimeout: listenTimeout, WriteTimeout: connectTimeout}
	pl := pq.NewDialListener(dialer, dsn, reconnectMin, time.Second, func(event pq.ListenerEventType, err error) {
		switch event { // in pq's goroutine: must not block
		case pq.ListenerEventDisconnected:
			set01(l.metrics.Connected[PeerListener], false)
			if err != nil && ctx.Err() == nil {
				l.log.Warn("connection lost, notifications may be missed", keyErr, err)
			}
		case pq.ListenerEventReconnected:
			set01(l.metrics.Connected[PeerListener], true)
			l.metrics.Reconnects[PeerListener].Inc()
		case pq.ListenerEventConnectionAttemptFailed:
			fail(err)
		}
	})

	var calls sync.WaitGroup // into pq, which may hold them; ended by closing it
	done := make(chan struct{})
	defer func() {
		close(done)
		closed := make(chan struct{})
		go func() {
			_ = pl.Close()
			for range pl.Notify { // closed by pq once nobody is left to send
			}
			calls.Wait()
			close(closed)
		}()
		select {
		case <-closed:
		case <-time.After(listenCloseTimeout): // held in a dial, which has its own limit
		}
	}()
	listening := make(chan struct{})
	calls.Go(func() {
		for _, channel := range []string{sqlfiles.Channel, l.probe} {
			if err := pl.Listen(channel); err != nil {
				fail(fmt.Errorf("LISTEN: %w", err))
				return
			}
		}
		close(listening)
	})
	calls.Go(func() { // never in the goroutine that drains Notify: the answer queues behind notifications
		ticker := time.NewTicker(pingInterval)
		defer ticker.Stop()
		for {
			select {
			case <-done:
				return
			case <-ticker.C:
				ping(pl)
			}
		}
	})
	for {
		select {
		case <-ctx.Done():
			return ctx.Err()
		case err := <-failed:
			return err
		case <-l.anew:
			return errDeaf
		case <-listening:
			listening = nil
			set01(l.metrics.Connected[PeerListener], true)
			onListening()
			l.reconnected.Ring() // what was committed before LISTEN rang for nobody
		case n, ok := <-pl.Notify:
			switch {
			case !ok:
				return errors.New("listener closed")
			case n == nil: // pq connected anew
				l.reconnected.Ring()
			case n.Channel == l.probe:
				l.heard.Store(int64(time.Since(start)))
			case l.concerns(n.Extra):
				l.rings.Add(1)
				l.notified.Ring()
			}
		}
	}
}

// ping makes the server send something, so that a dead link runs into the read limit. Its own
// result says nothing that pq does not notice by itself. pq panics when the server answers
// with an error.
func ping(pl *pq.Listener) {
	defer func() { _ = recover() }()
	_ = pl.Ping()
}
