package test

import (
	"sync"
	"testing"

	"outbox-relay/internal/testenv"
)

// A relay that is started before its servers lives, is not ready, and works once they are there.
func TestStartedBeforeItsServers(t *testing.T) {
	t.Parallel()
	pg, mq := testenv.OwnPostgres(t, testenv.Options{}), testenv.OwnRabbitMQ(t, testenv.Options{})
	o := outboxOn(t, pg.DSN, mq.URL)
	q := testenv.Consume(t, o.amqpURL, exchange)
	o.insertMany(t, 10, 10, "order.created")
	pg.Stop(t)
	mq.Stop(t)
	p := o.start(t)
	p.NotReady(t)
	if status, _ := p.Get(t, "/livez"); status != 200 {
		t.Errorf("/livez = %d while its servers are down, want 200", status)
	}
	pg.Start(t)
	p.NotReady(t) // without the broker it cannot do its work
	mq.Start(t)
	p.Ready(t)
	waitCount(t, q, 10)
	if !p.Running() {
		t.Error("the relay has ended")
	}
}

// Stopping and starting either server in the middle of a load loses nothing.
func TestServersRestartedUnderLoad(t *testing.T) {
	t.Parallel()
	pg, mq := testenv.OwnPostgres(t, testenv.Options{}), testenv.OwnRabbitMQ(t, testenv.Options{})
	o := outboxOn(t, pg.DSN, mq.URL)
	q := testenv.Consume(t, o.amqpURL, exchange)
	const batch = 200
	p := o.start(t, "BATCH_SIZE=200")
	p.Ready(t)
	l := o.startLoad(t)
	waitPublished(t, p, 100)
	for range 2 {
		mq.Stop(t)
		p.NotReady(t)
		mq.Start(t)
		p.Ready(t)
		waitPublished(t, p, 100)
		pg.Stop(t)
		p.NotReady(t)
		pg.Start(t)
		p.Ready(t)
		waitPublished(t, p, 100)
	}
	l.stop()
	o.verify(t, q, l.rolledBack, 4*batch*3/2)
	o.wantUntouched(t)
}

// Readiness probes open no connection of their own.
func TestProbesOpenNoConnections(t *testing.T) {
	t.Parallel()
	o := newOutbox(t)
	p := o.start(t)
	p.Ready(t)
	before := testenv.Value[int](t, o.dsn, "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND application_name = 'outbox-relay'")
	var probes sync.WaitGroup
	for range 20 {
		probes.Go(func() {
			for range 20 {
				p.Get(t, "/readyz")
			}
		})
	}
	probes.Wait()
	after := testenv.Value[int](t, o.dsn, "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND application_name = 'outbox-relay'")
	if after > before+1 { // counting the backlog takes one now and then
		t.Errorf("sessions = %d after 400 probes, %d before", after, before)
	}
}

// COPY fires the trigger once, whatever the number of rows.
func TestCopiedRowsAreAnnounced(t *testing.T) {
	t.Parallel()
	o := newOutbox(t)
	q := testenv.Consume(t, o.amqpURL, exchange)
	o.start(t, "FALLBACK_INTERVAL=1h").Ready(t)
	tx, err := o.db.BeginTx(t.Context(), nil)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = tx.Rollback() }()
	stmt, err := tx.PrepareContext(t.Context(), "COPY outbox_events (aggregate_type, aggregate_id, event_type, payload) FROM STDIN")
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = stmt.Close() }()
	for i := range 5000 {
		if _, err := stmt.ExecContext(t.Context(), "order", itoa(i%100), "order.copied", "{}"); err != nil {
			t.Fatal(err)
		}
	}
	if _, err := stmt.ExecContext(t.Context()); err != nil { // the end of the copy
		t.Fatal(err)
	}
	if err := tx.Commit(); err != nil {
		t.Fatal(err)
	}
	waitCount(t, q, 5000)
}
