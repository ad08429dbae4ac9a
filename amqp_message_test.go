package main

import (
	"cmp"
	"os"
	"strings"
	"testing"
	"time"

	amqp "github.com/rabbitmq/amqp091-go"
)

// testEvent returns an event that maps without fault; tests change one thing of it.
func testEvent() *Event {
	return &Event{
		ID:            "0190b9a1-6f0e-7c3a-9a52-6f1f3c0f4b11",
		Seq:           7,
		AggregateType: "order",
		AggregateID:   "42",
		EventType:     "order.placed",
		Payload:       []byte(`{"total": 12.50}`),
		PayloadBytes:  16,
		ContentType:   "application/json",
		CreatedAt:     time.Date(2026, 2, 3, 4, 5, 6, 789_000_000, time.UTC),
	}
}

func testMapper(tb testing.TB, exchange, key string) *messageMapper {
	tb.Helper()
	m, err := newMessageMapper(Config{AMQPExchange: exchange, AMQPRoutingKey: key, AMQPMaxMessageBytes: 1 << 20})
	if err != nil {
		tb.Fatal(err)
	}
	return m
}

func TestMessageOfAPlainEvent(t *testing.T) {
	t.Parallel()
	e := testEvent()
	msg, err := testMapper(t, "outbox", "{event_type}").message(e)
	if err != nil {
		t.Fatal(err)
	}
	p := msg.publishing
	if msg.exchange != "outbox" || msg.key != "order.placed" {
		t.Errorf("route = %q, %q", msg.exchange, msg.key)
	}
	if p.MessageId != e.ID || p.Type != "order.placed" || p.AppId != "outbox-relay" || p.ContentType != "application/json" || p.DeliveryMode != amqp.Persistent {
		t.Errorf("properties = %+v", p)
	}
	if want := time.Date(2026, 2, 3, 4, 5, 6, 0, time.UTC); !p.Timestamp.Equal(want) {
		t.Errorf("timestamp = %v, want %v", p.Timestamp, want)
	}
	if &p.Body[0] != &e.Payload[0] || len(p.Body) != len(e.Payload) {
		t.Error("the payload was copied")
	}
	checkTable(t, p.Headers, amqp.Table{"aggregate_type": "order", "aggregate_id": "42", "attempt": int64(1)})
}

func TestMessageChecks(t *testing.T) {
	t.Parallel()
	long := strings.Repeat("ä", 128) // 256 bytes, 128 characters
	tests := []struct {
		name          string
		exchange, key string // instead of outbox and {event_type}
		mutate        func(*Event)
		check         func(*testing.T, message)
		wantErr       string // a part of it; "" is none
	}{
		{
			name:   "the attempt counts from one",
			mutate: func(e *Event) { e.Attempts = 4 },
			check: func(t *testing.T, m message) {
				if got := m.publishing.Headers["attempt"]; got != int64(5) {
					t.Errorf("attempt = %v (%T), want int64 5", got, got)
				}
			},
		},
		{
			name:   "an event with no finite time has no timestamp",
			mutate: func(e *Event) { e.CreatedAt = time.Time{} },
			check: func(t *testing.T, m message) {
				if !m.publishing.Timestamp.IsZero() {
					t.Errorf("timestamp = %v", m.publishing.Timestamp)
				}
			},
		},
		{
			name:   "a time before 1970 has no form on the wire",
			mutate: func(e *Event) { e.CreatedAt = time.Unix(0, -1) },
			check: func(t *testing.T, m message) {
				if !m.publishing.Timestamp.IsZero() {
					t.Errorf("timestamp = %v", m.publishing.Timestamp)
				}
			},
		},
		{
			name:   "the first second of 1970 is sent",
			mutate: func(e *Event) { e.CreatedAt = time.Unix(0, 5) },
			check: func(t *testing.T, m message) {
				if !m.publishing.Timestamp.Equal(time.Unix(0, 0)) {
					t.Errorf("timestamp = %v", m.publishing.Timestamp)
				}
			},
		},
		{
			name: "the last day that PostgreSQL knows is sent", mutate: func(e *Event) { e.CreatedAt = time.Date(294276, 12, 31, 0, 0, 0, 0, time.UTC) },
			check: func(t *testing.T, m message) {
				if got := m.publishing.Timestamp.Year(); got != 294276 {
					t.Errorf("year = %d", got)
				}
			},
		},
		{name: "an empty payload is fine", mutate: func(e *Event) { e.Payload, e.PayloadBytes = nil, 0 }},
		{name: "a payload of the limit is fine", mutate: func(e *Event) { e.Payload = make([]byte, 1<<20) }},
		{
			name: "a payload over the limit is rejected", mutate: func(e *Event) { e.Payload = make([]byte, 1<<20+1) },
			wantErr: "payload is 1048577 bytes, over the limit of 1048576",
		},
		{
			name: "a payload that was not loaded is rejected with its size", mutate: func(e *Event) { e.Payload, e.PayloadBytes, e.Oversized = nil, 5<<20, true },
			wantErr: "payload is 5242880 bytes",
		},
		{name: "255 bytes of type are fine", mutate: func(e *Event) { e.EventType = long[:254] + "x" }},
		{name: "lengths are bytes, not characters", mutate: func(e *Event) { e.EventType = long }, key: "fixed", wantErr: "type is 256 bytes, over the limit of 255"},
		{name: "a message-id too long", mutate: func(e *Event) { e.ID = long }, wantErr: "message-id is 256 bytes"},
		{name: "a content type too long", mutate: func(e *Event) { e.ContentType = long }, wantErr: "content-type is 256 bytes"},
		{name: "a long aggregate id is fine as a header", mutate: func(e *Event) { e.AggregateID = long }},
		{name: "a routing key too long", key: "{aggregate_id}", mutate: func(e *Event) { e.AggregateID = long }, wantErr: "routing key is 256 bytes"},
		{name: "a routing key too long in sum", key: "{aggregate_id}.{aggregate_id}", mutate: func(e *Event) { e.AggregateID = long[:128] }, wantErr: "routing key is 257 bytes"},
		{name: "an exchange too long", exchange: "{aggregate_id}", mutate: func(e *Event) { e.AggregateID = long }, wantErr: "exchange is 256 bytes"},
		{name: "a route needs a header of a row without any", key: "{header.tenant}", wantErr: `routing key: header "tenant", which the route needs, is missing`},
		{
			name: "a route may use a header that is not sent on", exchange: "{header.reply-to}", key: "{header.n}",
			mutate: func(e *Event) { e.Headers = []byte(`{"reply-to":"answers","n":1.50}`) },
			check: func(t *testing.T, m message) {
				if m.exchange != "answers" || m.key != "1.50" || m.publishing.ReplyTo != "answers" {
					t.Errorf("message = %+v", m)
				}
			},
		},
		{name: "bytes that are no UTF-8 do no harm", mutate: func(e *Event) {
			e.ID, e.AggregateID, e.EventType, e.ContentType = "\xff\x00", "\xfe", "a\x00b", "\x80"
			e.Headers = []byte("{\"a\":\"\xff\",\"\xfe\":\"\\u0000\"}")
		}},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			e := testEvent()
			if tt.mutate != nil {
				tt.mutate(e)
			}
			msg, err := testMapper(t, cmp.Or(tt.exchange, "outbox"), cmp.Or(tt.key, "{event_type}")).message(e)
			checkErr(t, err, tt.wantErr)
			if err != nil {
				return
			}
			checkMessage(t, msg)
			if tt.check != nil {
				tt.check(t, msg)
			}
		})
	}
}

func TestMapperRefusesBadRoutes(t *testing.T) {
	t.Parallel()
	_, err := newMessageMapper(Config{AMQPExchange: "{nope}", AMQPRoutingKey: "a}"})
	checkErr(t, err, "AMQP_EXCHANGE: template")
	checkErr(t, err, "AMQP_ROUTING_KEY: template") // both at once
	_, err = newMessageMapper(Config{AMQPRoutingKey: strings.Repeat("x", 256)})
	checkErr(t, err, "AMQP_ROUTING_KEY is 256 bytes, over the limit of 255")
}

func TestStaticExchange(t *testing.T) {
	t.Parallel()
	for exchange, static := range map[string]bool{"": true, "outbox": true, "{aggregate_type}": false} {
		name, ok := testMapper(t, exchange, "k").staticExchange()
		if ok != static || ok && name != exchange {
			t.Errorf("staticExchange() with %q = %q, %v", exchange, name, ok)
		}
	}
}

func TestMessageFormatIsDocumented(t *testing.T) {
	t.Parallel()
	doc, err := os.ReadFile("docs/message-format.md")
	if err != nil {
		t.Fatal(err)
	}
	wanted := []string{appID}
	for key := range propertyKeys {
		wanted = append(wanted, key)
	}
	for key := range reservedKeys {
		wanted = append(wanted, key)
	}
	for key := range brokerKeys {
		wanted = append(wanted, key)
	}
	for _, key := range wanted {
		if !strings.Contains(string(doc), "`"+key+"`") {
			t.Errorf("docs/message-format.md does not mention `%s`", key)
		}
	}
}

// checkMessage asserts what must hold of every message, so that the client library can encode it.
func checkMessage(tb testing.TB, m message) {
	tb.Helper()
	p := m.publishing
	if err := p.Headers.Validate(); err != nil {
		tb.Error(err)
	}
	for _, s := range []string{m.exchange, m.key, p.MessageId, p.Type, p.AppId, p.ContentType, p.ContentEncoding, p.CorrelationId, p.ReplyTo, p.Expiration, p.UserId} {
		if len(s) > 255 {
			tb.Errorf("a short string of %d bytes", len(s))
		}
	}
	checkField(tb, p.Headers)
}

func checkField(tb testing.TB, v any) {
	tb.Helper()
	switch v := v.(type) {
	case int:
		tb.Error("a plain int: the library cuts it to 32 bits")
	case []any:
		for _, item := range v {
			checkField(tb, item)
		}
	case amqp.Table:
		for key, item := range v {
			if len(key) > 255 {
				tb.Errorf("a header's name of %d bytes", len(key))
			}
			checkField(tb, item)
		}
	}
}

func FuzzMessage(f *testing.F) {
	f.Add("id", "order", "42", "order.placed", "application/json", []byte(`{}`), []byte(`{"a":[1,"x",null,{"b":true}],"n":{"m":1.5}}`), 0, int64(1_700_000_000))
	f.Add("", "", "", "", "", []byte(nil), []byte(`{"priority":1,"expiration":"5","CC":["a"],"correlation-id":7}`), -1, int64(-1))
	f.Add("\xff", "\x00", "{}", "", "x", []byte{0}, []byte(`{"x":1e400,"y":-0.0,"z":9223372036854775808}`), 1<<40, int64(1)<<62)
	f.Add("i", "t", "a", "e", "c", []byte{}, []byte(`[[[[`), 1, int64(0))
	m := testMapper(f, "{aggregate_type}", "{event_type}.{aggregate_id}")
	f.Fuzz(func(t *testing.T, id, aggType, aggID, eventType, contentType string, payload, headers []byte, attempts int, created int64) {
		msg, err := m.message(&Event{
			ID: id, AggregateType: aggType, AggregateID: aggID, EventType: eventType, ContentType: contentType,
			Payload: payload, PayloadBytes: len(payload), Headers: headers, Attempts: attempts, CreatedAt: time.Unix(created, 0),
		})
		if err == nil {
			checkMessage(t, msg)
		}
	})
}

func BenchmarkMessage(b *testing.B) {
	for _, bm := range []struct{ name, headers string }{
		{"no headers", ""},
		{"trace headers", `{"traceparent": "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01", "tenant": "acme", "version": 3}`},
		{"nested headers", `{"a": [1, "x", null, {"b": true}], "n": {"m": 1.5}, "priority": 3, "correlation-id": "c-1"}`},
	} {
		b.Run(bm.name, func(b *testing.B) {
			m := testMapper(b, "outbox", "{event_type}")
			e := testEvent()
			if bm.headers != "" {
				e.Headers = []byte(bm.headers)
			}
			b.ReportAllocs()
			for b.Loop() {
				if _, err := m.message(e); err != nil {
					b.Fatal(err)
				}
			}
		})
	}
}
