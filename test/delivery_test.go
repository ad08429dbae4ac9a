package test

import (
	"context"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
	amqp "github.com/rabbitmq/amqp091-go"

	"outbox-relay/internal/testenv"
)

func TestCommittedEventReachesTheQueue(t *testing.T) {
	t.Parallel()
	o := newOutbox(t)
	q := testenv.Consume(t, o.amqpURL, exchange)
	p := o.start(t)
	p.Ready(t)
	// What psql would send: only the columns an application knows.
	id := testenv.Value[string](t, o.dsn,
		`INSERT INTO outbox_events (aggregate_type, aggregate_id, event_type, payload)
		 VALUES ('order', '42', 'order.created', '{"total": 10}') RETURNING id`)
	if d := q.Next(t, patience); d.MessageId != id || string(d.Body) != `{"total": 10}` || d.RoutingKey != "order.created" {
		t.Errorf("got %s %s %s, want %s order.created", d.MessageId, d.RoutingKey, d.Body, id)
	}
	if r := o.waitProcessed(t, id); r.attempts != 0 || r.lastError != "" {
		t.Errorf("row = %+v, want no attempt", r)
	}
	if n := p.Metric(t, "outbox_events_published_total"); n != 1 {
		t.Errorf("outbox_events_published_total = %v, want 1", n)
	}
}

// The fallback poll alone would take half a minute, so that a notification must have done it.
func TestEventIsPublishedPromptly(t *testing.T) {
	t.Parallel()
	o := newOutbox(t)
	q := testenv.Consume(t, o.amqpURL, exchange)
	o.start(t, "FALLBACK_INTERVAL=1h").Ready(t)
	for range 20 {
		o.insert(t, event{})
		q.Next(t, 5*time.Second)
	}
}

func TestRolledBackEventIsNotPublished(t *testing.T) {
	t.Parallel()
	o := newOutbox(t)
	q := testenv.Consume(t, o.amqpURL, exchange)
	o.start(t, "FALLBACK_INTERVAL=100ms").Ready(t)
	for range 20 {
		tx, err := o.db.BeginTx(t.Context(), nil)
		if err != nil {
			t.Fatal(err)
		}
		_, err = tx.ExecContext(context.Background(),
			`INSERT INTO outbox_events (aggregate_type, aggregate_id, event_type, payload) VALUES ('order', '1', 'lost', '{}')`)
		if err != nil {
			t.Fatal(err)
		}
		if err := tx.Rollback(); err != nil {
			t.Fatal(err)
		}
		id := o.insert(t, event{eventType: "kept"})[0]
		if d := q.Next(t, patience); d.MessageId != id {
			t.Fatalf("got %s %s, want kept %s", d.Type, d.MessageId, id)
		}
	}
	q.Quiet(t, 300*time.Millisecond) // several fallback polls
}

func TestTenThousandEventsOfOneTransactionComeInOrder(t *testing.T) {
	t.Parallel()
	o := newOutbox(t)
	q := testenv.Consume(t, o.amqpURL, exchange)
	o.start(t).Ready(t)
	o.insertMany(t, 10_000, 100, "order.created")
	o.verify(t, q, nil, 0)
}

func TestBacklogIsPublishedAtStart(t *testing.T) {
	t.Parallel()
	o := newOutbox(t)
	q := testenv.Consume(t, o.amqpURL, exchange)
	o.insertMany(t, 1000, 10, "order.created")
	o.start(t, "FALLBACK_INTERVAL=1h", "BATCH_SIZE=100")
	o.verify(t, q, nil, 0)
}

func TestMessageOnTheWire(t *testing.T) {
	t.Parallel()
	o := newOutbox(t)
	q := testenv.Consume(t, o.amqpURL, exchange)
	o.start(t).Ready(t)
	const uuid = "01234567-89ab-4def-8123-456789abcdef"
	plain := amqp.Delivery{
		MessageId: uuid, Type: "order.created", AppId: "outbox-relay", ContentType: "application/json",
		DeliveryMode: amqp.Persistent, Timestamp: time.Date(2024, 2, 29, 12, 30, 59, 0, time.UTC),
		Exchange: exchange, RoutingKey: "order.created", Body: []byte(`{"total": 10}`),
		Headers: amqp.Table{"aggregate_type": "order", "aggregate_id": "4711", "attempt": int64(1)},
	}
	full := plain
	full.ContentType, full.ContentEncoding, full.CorrelationId = "application/cloudevents+json", "identity", "17"
	full.ReplyTo, full.Expiration, full.Priority = "replies", "60000000", 7
	full.Headers = amqp.Table{
		"aggregate_type": "order", "aggregate_id": "4711", "attempt": int64(1),
		"traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01",
		"big":         int64(9007199254740993), "half": 0.5, "yes": true, "none": nil, "umlaut": "Größe",
		"list": []any{int64(1), "x", nil, amqp.Table{"b": true}},
		"n":    amqp.Table{"m": 1.5},
	}
	for _, tt := range []struct {
		name, headers string
		want          amqp.Delivery
	}{
		{"without headers", "", plain},
		{"with headers of JSON null", "null", plain},
		{"with all that headers can set", `{
			"content-type": "application/cloudevents+json", "content-encoding": "identity", "correlation-id": 17,
			"reply-to": "replies", "expiration": 60000000, "priority": 7,
			"traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01",
			"big": 9007199254740993, "half": 0.5, "yes": true, "none": null, "umlaut": "Größe",
			"list": [1, "x", null, {"b": true}], "n": {"m": 1.5}}`, full},
	} {
		t.Run(tt.name, func(t *testing.T) {
			_, err := o.db.ExecContext(t.Context(),
				`INSERT INTO outbox_events (id, aggregate_type, aggregate_id, event_type, payload, headers, created_at)
				 VALUES ($1, 'order', '4711', 'order.created', '{"total": 10}', nullif($2, '')::jsonb, '2024-02-29 12:30:59.999+00')`,
				uuid, tt.headers)
			if err != nil {
				t.Fatal(err)
			}
			got := q.Next(t, patience)
			o.waitProcessed(t, uuid)
			got.Timestamp = got.Timestamp.UTC()
			if diff := cmp.Diff(tt.want, got, cmpopts.IgnoreFields(amqp.Delivery{}, "ConsumerTag", "DeliveryTag")); diff != "" {
				t.Errorf("message differs from what is documented (-want +got):\n%s", diff)
			}
			if _, err := o.db.ExecContext(t.Context(), `DELETE FROM outbox_events`); err != nil {
				t.Fatal(err)
			}
		})
	}
}

func TestPayloadGoesOutByteForByte(t *testing.T) {
	t.Parallel()
	const million = 1 << 20
	text := []string{
		"", " ", "plain", "Grüße, 世界 🌍 \u202e", "line\r\nline\ttab \x01\x7f", `{"a": 1`, strings.Repeat("x", million),
	}
	bytea := append([]string{"\x00", "\x00\x01\xfe\xff", strings.Repeat("\x00\xff", million/2)}, text...)
	json := []string{
		`{"z":1,"a":12345678901234567890.10, "a" : 1e400}`, ` [ 1,2 ] `, "null", `""`, `"\u00fc\ud83c\udf0d"`, `"世界"`,
		`"` + strings.Repeat("y", million) + `"`,
	}
	// jsonb keeps no text: its bytes are those of its text form.
	jsonb := map[string]string{
		`{"z":1,"a":12345678901234567890.10}`: `{"a": 12345678901234567890.10, "z": 1}`,
		`9007199254740993`:                    `9007199254740993`,
		`1e50`:                                "1" + strings.Repeat("0", 50),
		`"\u00fc 世界 \ud83c\udf0d"`:            `"ü 世界 🌍"`,
		`null`:                                `null`,
		`{}`:                                  `{}`,
		`["` + strings.Repeat("z", million) + `"]`: `["` + strings.Repeat("z", million) + `"]`,
	}
	same := func(values []string) map[string]string {
		m := make(map[string]string)
		for _, v := range values {
			m[v] = v
		}
		return m
	}
	for _, tt := range []struct {
		columnType, contentType string
		bodies                  map[string]string
	}{
		{"jsonb", "application/json", jsonb},
		{"json", "application/json", same(json)},
		{"text", "text/plain", same(text)},
		{"bytea", "application/octet-stream", same(bytea)},
	} {
		t.Run(tt.columnType, func(t *testing.T) {
			t.Parallel()
			dsn := testenv.Database(t)
			testenv.Exec(t, dsn, oldTable(tt.columnType))
			o := outboxOn(t, dsn, testenv.Vhost(t))
			q := testenv.Consume(t, o.amqpURL, exchange)
			o.start(t).Ready(t)
			want := make(map[string]string)
			for in, out := range tt.bodies {
				var value any = in
				if tt.columnType == "bytea" {
					value = []byte(in)
				}
				id := ""
				err := o.db.QueryRowContext(t.Context(),
					`INSERT INTO outbox_events (aggregate_type, aggregate_id, event_type, payload) VALUES ('order', '1', 't', $1) RETURNING id`,
					value).Scan(&id)
				if err != nil {
					t.Fatal(err)
				}
				want[id] = out
			}
			for _, d := range q.Collect(t, len(want), patience) {
				if got, want := string(d.Body), want[d.MessageId]; got != want {
					t.Errorf("body = %.100q (%d bytes), want %.100q (%d bytes)", got, len(got), want, len(want))
				}
				if d.ContentType != tt.contentType {
					t.Errorf("content type = %q, want %q", d.ContentType, tt.contentType)
				}
			}
		})
	}
}

func TestRouteIsMadeOfTheRow(t *testing.T) {
	t.Parallel()
	o := newOutbox(t)
	q := testenv.Consume(t, o.amqpURL, "events.order")
	o.start(t, "AMQP_EXCHANGE=events.{aggregate_type}", "AMQP_ROUTING_KEY={header.region}.{event_type}.{aggregate_id}").Ready(t)
	o.insert(t, event{aggregate: "9", headers: `{"region": "eu"}`})
	if d, want := q.Next(t, patience), "eu.order.created.9"; d.RoutingKey != want {
		t.Errorf("routing key = %q, want %q", d.RoutingKey, want)
	}
}

func TestOutboxesOfOneDatabaseDoNotDisturbEachOther(t *testing.T) {
	t.Parallel()
	dsn, vhost := testenv.Database(t), testenv.Vhost(t)
	const n = 200
	var outboxes []*outbox
	var queues []*testenv.Queue
	var relays []*testenv.Process
	for i := range 2 {
		schema := fmt.Sprintf("s%d", i)
		testenv.Exec(t, dsn, "CREATE SCHEMA "+schema)
		o := outboxOn(t, dsn+"&search_path="+schema, vhost)
		queues = append(queues, testenv.Consume(t, vhost, schema))
		relays = append(relays, o.start(t, "AMQP_EXCHANGE="+schema))
		outboxes = append(outboxes, o)
	}
	for _, p := range relays {
		p.Ready(t)
		testenv.Eventually(t, patience, "both relays work", func() bool { return p.Metric(t, "outbox_leader") == 1 })
	}
	for _, o := range outboxes {
		o.insertMany(t, n, 10, "order.created")
	}
	for i, o := range outboxes {
		o.verify(t, queues[i], nil, 0)
	}
	relays[0].Kill(t)
	id := outboxes[1].insert(t, event{})[0]
	if d := queues[1].Collect(t, n+1, patience)[n]; d.MessageId != id {
		t.Errorf("got %s, want %s", d.MessageId, id)
	}
}
