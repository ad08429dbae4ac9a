package bench

import (
	"context"
	"database/sql"
	"fmt"
	"strconv"
	"sync"
	"testing"
	"time"

	"github.com/lib/pq"
	amqp "github.com/rabbitmq/amqp091-go"

	"outbox-relay/internal/testenv"
)

// publisher starts what carries events of an outbox to its exchange, until the measurement's end. It
// returns nil unless that is the relay.
type publisher func(t *testing.T, o outbox) *testenv.Process

// startRelay runs the relay itself, with default settings but for these and those of -set.
func startRelay(env ...string) publisher {
	return func(t *testing.T, o outbox) *testenv.Process {
		t.Helper()
		all := append([]string{"DATABASE_URL=" + o.dsn, "AMQP_URL=" + o.amqpURL}, env...)
		p := testenv.Start(t, append(all, settings...)...)
		p.Ready(t)
		return p
	}
}

// message is what the relay makes of an event.
func message(id, aggregate string, body []byte) amqp.Publishing {
	return amqp.Publishing{
		ContentType: "application/json", DeliveryMode: amqp.Persistent, MessageId: id,
		Type: eventType, AppId: "outbox-relay", Timestamp: time.Now().Truncate(time.Second), Body: body,
		Headers: amqp.Table{"aggregate_type": aggregateType, "aggregate_id": aggregate, "attempt": int64(1)},
	}
}

// uuid makes a message-id of an event's number.
func uuid(n int) string { return fmt.Sprintf("00000000-0000-4000-8000-%012x", n) }

// Statements that replace the doorbell.
const (
	noTrigger    = `DROP TRIGGER outbox_notify ON outbox_events`
	alwaysNotify = `CREATE OR REPLACE FUNCTION outbox_notify() RETURNS trigger LANGUAGE plpgsql AS
		$$ BEGIN PERFORM pg_notify('outbox_event', ''); RETURN NULL; END $$`
	notifyEachID = noTrigger + `;
		CREATE FUNCTION notify_id() RETURNS trigger LANGUAGE plpgsql AS
		$$ BEGIN PERFORM pg_notify('outbox_event', NEW.id::text); RETURN NULL; END $$;
		CREATE TRIGGER notify_id AFTER INSERT ON outbox_events FOR EACH ROW EXECUTE FUNCTION notify_id()`
	notifyPayload = noTrigger + `;
		CREATE FUNCTION notify_payload() RETURNS trigger LANGUAGE plpgsql AS
		$$ BEGIN PERFORM pg_notify('outbox_event', NEW.payload::text); RETURN NULL; END $$;
		CREATE TRIGGER notify_payload AFTER INSERT ON outbox_events FOR EACH ROW EXECUTE FUNCTION notify_payload()`
)

// startFloor forwards what the trigger puts into notifications, and reads no table: no relay that reads
// one can be faster.
func startFloor(t *testing.T, o outbox) *testenv.Process {
	t.Helper()
	testenv.Exec(t, o.dsn, notifyPayload)
	ch := channel(t, dial(t, o.amqpURL))
	forward(t, o, func(_ context.Context, payload string) error {
		n := number([]byte(payload))
		return ch.Publish(exchange, eventType, true, false, message(uuid(n), strconv.Itoa(n), []byte(payload)))
	}, func(context.Context) error { return nil })
	return nil
}

// startPlain runs a relay as it is usually written: a wake-up or a tick of a second makes it take one
// batch, publish one event after the other, each confirmed, and mark each by a statement of its own.
func startPlain(t *testing.T, o outbox) *testenv.Process {
	t.Helper()
	testenv.Exec(t, o.dsn, notifyEachID)
	ch := channel(t, dial(t, o.amqpURL))
	if err := ch.Confirm(false); err != nil {
		t.Fatal(err)
	}
	db := testenv.DB(t, o.dsn)
	work := func(ctx context.Context) error { return plainBatch(ctx, db, ch) }
	forward(t, o, func(ctx context.Context, _ string) error { return work(ctx) }, work)
	return nil
}

func plainBatch(ctx context.Context, db *sql.DB, ch *amqp.Channel) error {
	type event struct {
		id, aggregate string
		payload       []byte
	}
	tx, err := db.BeginTx(ctx, nil)
	if err != nil {
		return err
	}
	defer func() { _ = tx.Rollback() }()
	rows, err := tx.QueryContext(ctx, `SELECT id, aggregate_id, payload FROM outbox_events
		WHERE processed_at IS NULL ORDER BY seq LIMIT 100 FOR UPDATE SKIP LOCKED`)
	if err != nil {
		return err
	}
	defer func() { _ = rows.Close() }()
	var events []event
	for rows.Next() {
		var e event
		if err := rows.Scan(&e.id, &e.aggregate, &e.payload); err != nil {
			return err
		}
		events = append(events, e)
	}
	if err := rows.Err(); err != nil {
		return err
	}
	for _, e := range events {
		confirm, err := ch.PublishWithDeferredConfirmWithContext(ctx, exchange, eventType, true, false, message(e.id, e.aggregate, e.payload))
		if err != nil {
			return err
		}
		if ok, err := confirm.WaitContext(ctx); !ok || err != nil {
			return fmt.Errorf("event %s: confirmed %t, %w", e.id, ok, err)
		}
		if _, err := tx.ExecContext(ctx, `UPDATE outbox_events SET processed_at = now() WHERE id = $1`, e.id); err != nil {
			return err
		}
	}
	return tx.Commit()
}

// forward listens until the measurement's end, and calls heard for each notification and tick once a
// second.
func forward(t *testing.T, o outbox, heard func(context.Context, string) error, tick func(context.Context) error) {
	t.Helper()
	l := pq.NewListener(o.dsn, time.Second, time.Second, nil)
	if err := l.Listen("outbox_event"); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	var wg sync.WaitGroup
	wg.Go(func() {
		second := time.NewTicker(time.Second)
		defer second.Stop()
		for {
			var err error
			select {
			case <-ctx.Done():
				return
			case n := <-l.Notify:
				if n != nil { // nil after a reconnect
					err = heard(ctx, n.Extra)
				}
			case <-second.C:
				err = tick(ctx)
			}
			if err != nil && ctx.Err() == nil {
				t.Error(err)
				return
			}
		}
	})
	t.Cleanup(func() {
		cancel()
		_ = l.Close()
		for range l.Notify { // the listener ends once all was taken
		}
		wg.Wait()
	})
}
