package main

import (
	"testing"
	"time"
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

func TestMessageMapsAnEvent(t *testing.T) {
	m, err := newMessageMapper(Config{AMQPExchange: "outbox", AMQPRoutingKey: "{event_type}", AMQPMaxMessageBytes: 16 << 20})
	if err != nil {
		t.Fatal(err)
	}
	e := testEvent()
	e.Headers = []byte(`{"traceparent": "00-1", "n": 9007199254740993, "priority": 3}`)
	msg, err := m.message(e)
	if err != nil {
		t.Fatal(err)
	}
	if err := msg.publishing.Headers.Validate(); err != nil {
		t.Error(err)
	}
	if msg.exchange != "outbox" || msg.key != "order.placed" || msg.publishing.Priority != 3 {
		t.Errorf("message = %+v", msg)
	}
	if n := msg.publishing.Headers["n"]; n != int64(9007199254740993) {
		t.Errorf("header n = %v (%T)", n, n)
	}
}
