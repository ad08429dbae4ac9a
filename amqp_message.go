package main

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"strconv"
	"time"

	amqp "github.com/rabbitmq/amqp091-go"
)

// What the relay itself puts into a message's headers.
const (
	headerAggregateType = "aggregate_type"
	headerAggregateID   = "aggregate_id"
	headerAttempt       = "attempt"
	headerReplay        = "replay" // true in what the replay command sends, otherwise left out

	appID = "outbox-relay"
)

const (
	// maxShortString is what AMQP's short strings hold, in bytes. amqp091-go finds a longer one
	// only while it encodes and then shuts the whole connection down.
	maxShortString = 255
	// maxHeaderBytes bounds properties and headers as encoded. They travel in one frame of at
	// most 131,064 bytes by default, over which the broker closes the connection. The margin is
	// for what the broker adds on the way to a consumer, such as x-death.
	maxHeaderBytes = 128_000
	// maxHeadersText bounds the headers column before it is decoded. Six bytes of JSON text (an
	// escaped control character) for one on the wire is the most that can make sense.
	maxHeadersText = 1 << 20
	// maxExpiration is RabbitMQ 4.0's limit in milliseconds: ten years of 365 days.
	maxExpiration = 10 * 365 * 24 * 60 * 60 * 1000
	// maxHeaderDepth bounds the nesting of headers, since encoding them recurses.
	maxHeaderDepth = 32
)

// message is an event made ready to publish.
type message struct {
	exchange, key string
	publishing    amqp.Publishing
}

// messageMapper makes messages of events by the settings. It is never changed, so goroutines
// may share it.
type messageMapper struct {
	exchange, key template
	maxBytes      int64
}

// newMessageMapper parses the templates of the exchange and the routing key.
func newMessageMapper(cfg Config) (*messageMapper, error) {
	exchange, exchangeErr := parseRoute("AMQP_EXCHANGE", cfg.AMQPExchange)
	key, keyErr := parseRoute("AMQP_ROUTING_KEY", cfg.AMQPRoutingKey)
	if err := errors.Join(exchangeErr, keyErr); err != nil {
		return nil, err
	}
	return &messageMapper{exchange: exchange, key: key, maxBytes: cfg.AMQPMaxMessageBytes}, nil
}

func parseRoute(setting, s string) (template, error) {
	t, err := parseTemplate(s)
	if err != nil {
		return template{}, fmt.Errorf("%s: %w", setting, err)
	}
	if t.static() {
		text, _ := t.expand(nil, nil)
		if err := checkShort(setting, text); err != nil {
			return template{}, err
		}
	}
	return t, nil
}

// staticExchange returns the exchange when it is the same for every event.
func (m *messageMapper) staticExchange() (name string, ok bool) {
	if !m.exchange.static() {
		return "", false
	}
	name, _ = m.exchange.expand(nil, nil)
	return name, true
}

// message maps an event. The payload is shared, not copied. An error means that the event can
// never be sent as the row stands; it names what is wrong and quotes no payload and no value of
// a header, so it may be stored and logged.
func (m *messageMapper) message(e *Event) (message, error) {
	if size := int64(max(e.PayloadBytes, len(e.Payload))); e.Oversized || size > m.maxBytes {
		return message{}, fmt.Errorf("payload is %d bytes, over the limit of %d", size, m.maxBytes)
	}
	headers, err := decodeHeaders(e.Headers)
	if err != nil {
		return message{}, err
	}
	msg := message{publishing: amqp.Publishing{
		ContentType:  e.ContentType,
		DeliveryMode: amqp.Persistent,
		MessageId:    e.ID,
		Type:         e.EventType,
		AppId:        appID,
		Body:         e.Payload,
	}}
	p := &msg.publishing
	if e.CreatedAt.Unix() >= 0 { // earlier ones, and the zero time, have no form on the wire
		p.Timestamp = e.CreatedAt.Truncate(time.Second)
	}
	if msg.exchange, err = m.exchange.expand(e, headers); err != nil {
		return message{}, fmt.Errorf("exchange: %w", err)
	}
	if msg.key, err = m.key.expand(e, headers); err != nil {
		return message{}, fmt.Errorf("routing key: %w", err)
	}
	if p.Headers, err = tableOf(headers, p); err != nil {
		return message{}, err
	}
	p.Headers[headerAggregateType] = e.AggregateType
	p.Headers[headerAggregateID] = e.AggregateID
	p.Headers[headerAttempt] = int64(e.Attempts) + 1
	if err := msg.check(); err != nil {
		return message{}, err
	}
	return msg, nil
}

// check makes sure that the client library can encode the message and the broker can read it.
func (m *message) check() error {
	p := &m.publishing
	for _, s := range []struct{ name, value string }{
		{"exchange", m.exchange},
		{"routing key", m.key},
		{"message-id", p.MessageId},
		{"type", p.Type},
		{"content-type", p.ContentType},
		{"content-encoding", p.ContentEncoding},
		{"correlation-id", p.CorrelationId},
		{"reply-to", p.ReplyTo},
	} {
		if err := checkShort(s.name, s.value); err != nil {
			return err
		}
	}
	if n := headerFrameBytes(p); n > maxHeaderBytes {
		return fmt.Errorf("headers and properties are %d bytes encoded, over the limit of %d", n, maxHeaderBytes)
	}
	return nil
}

func checkShort(name, value string) error {
	if len(value) > maxShortString {
		return fmt.Errorf("%s is %d bytes, over the limit of %d", name, len(value), maxShortString)
	}
	return nil
}

// decodeHeaders decodes the headers column; nil for NULL and for JSON null.
func decodeHeaders(text []byte) (map[string]any, error) {
	if len(text) == 0 {
		return nil, nil
	}
	if len(text) > maxHeadersText {
		return nil, fmt.Errorf("headers are %d bytes of JSON, over the limit of %d", len(text), maxHeadersText)
	}
	var v any
	d := json.NewDecoder(bytes.NewReader(text))
	d.UseNumber()
	if err := d.Decode(&v); err != nil {
		return nil, errors.New("headers are not valid JSON") // the decoder's own words quote the text
	}
	if _, err := d.Token(); err != io.EOF {
		return nil, errors.New("headers are followed by more than one JSON value")
	}
	switch v := v.(type) {
	case nil:
		return nil, nil
	case map[string]any:
		return v, nil
	}
	return nil, errors.New("headers are not a JSON object")
}

// quoteName quotes a header's name for an error; the name comes from the row and may be long.
func quoteName(name string) string {
	const enough = 64
	if len(name) > enough {
		return strconv.Quote(name[:enough]) + "..."
	}
	return strconv.Quote(name)
}
