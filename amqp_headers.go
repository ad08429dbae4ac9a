package main

import (
	"encoding/json"
	"errors"
	"fmt"
	"strconv"
	"strings"

	amqp "github.com/rabbitmq/amqp091-go"
)

// propertyKeys are the keys of a row's headers that set a property of the message and are not
// copied into its headers. JSON null leaves the property as it is.
var propertyKeys = map[string]func(p *amqp.Publishing, v any) error{
	"content-type":     func(p *amqp.Publishing, v any) error { return setString(&p.ContentType, v) },
	"content-encoding": func(p *amqp.Publishing, v any) error { return setString(&p.ContentEncoding, v) },
	"correlation-id":   func(p *amqp.Publishing, v any) (err error) { p.CorrelationId, err = scalarText(v); return },
	"reply-to":         setReplyTo,
	"expiration":       setExpiration,
	"priority":         setPriority,
}

// brokerKeys are headers that the broker itself reads, and that close the channel or even the
// connection when they have another type. JSON null leaves them out.
var brokerKeys = map[string]func(v any) error{
	"CC":  checkRoutes, // 406 for no list
	"BCC": checkRoutes,
	"x-stream-filter-value": func(v any) error { // 541 from a stream; tried on RabbitMQ 4.0.5
		var s string
		return setString(&s, v)
	},
}

// reservedKeys may not stand in a row's headers: the relay sets them itself, or never.
var reservedKeys = map[string]bool{
	headerAggregateType: true,
	headerAggregateID:   true,
	headerAttempt:       true,
	headerReplay:        true,
	"message-id":        true,
	"type":              true,
	"timestamp":         true,
	"app-id":            true,
	"delivery-mode":     true,
	"user-id":           true, // the broker closes the channel unless it is the relay's own login
}

// tableOf turns decoded headers into an AMQP table, in place, and moves the property keys into p.
func tableOf(headers map[string]any, p *amqp.Publishing) (amqp.Table, error) {
	if headers == nil {
		return make(amqp.Table, 3), nil
	}
	for key, v := range headers {
		if err := setHeader(headers, key, v, p); err != nil {
			return nil, fmt.Errorf("header %s %w", quoteName(key), err)
		}
	}
	return headers, nil
}

func setHeader(headers amqp.Table, key string, v any, p *amqp.Publishing) error {
	if reservedKeys[key] {
		return errors.New("is reserved for the relay")
	}
	if set, ok := propertyKeys[key]; ok {
		delete(headers, key)
		if v == nil {
			return nil
		}
		return set(p, v)
	}
	if check, ok := brokerKeys[key]; ok {
		if v == nil {
			delete(headers, key)
			return nil
		}
		if err := check(v); err != nil {
			return err
		}
	}
	if len(key) > maxShortString {
		return fmt.Errorf("has a name of %d bytes, over the limit of %d", len(key), maxShortString)
	}
	field, err := fieldOf(v, 1)
	headers[key] = field
	return err
}

// fieldOf turns a decoded JSON value into what amqp091-go can encode, in place. The library
// refuses map[string]any and json.Number, and cuts a plain int to 32 bits.
func fieldOf(v any, depth int) (any, error) {
	if depth > maxHeaderDepth {
		return nil, fmt.Errorf("is nested more than %d deep", maxHeaderDepth)
	}
	switch v := v.(type) {
	case json.Number:
		return numberOf(v.String())
	case []any:
		for i := range v {
			field, err := fieldOf(v[i], depth+1)
			if err != nil {
				return nil, err
			}
			v[i] = field
		}
	case map[string]any:
		for key := range v {
			if len(key) > maxShortString {
				return nil, fmt.Errorf("holds a name of %d bytes, over the limit of %d", len(key), maxShortString)
			}
			field, err := fieldOf(v[key], depth+1)
			if err != nil {
				return nil, err
			}
			v[key] = field
		}
		return amqp.Table(v), nil
	}
	return v, nil
}

// numberOf returns an int64 or, where nothing is lost, a float64.
func numberOf(text string) (any, error) {
	if n, err := strconv.ParseInt(text, 10, 64); err == nil {
		return n, nil
	}
	f, err := strconv.ParseFloat(text, 64)
	if err != nil || !exactDouble(text, f) {
		return nil, errors.New("has a number that is neither a 64-bit integer nor exact as a double")
	}
	return f, nil
}

// exactDouble reports whether f stands for the decimal number in text: it either has exactly that
// value, or that number is the shortest one which reads as f. So 0.1 passes, which no double
// equals, because every reader of the double prints it as 0.1 again.
func exactDouble(text string, f float64) bool {
	const allDigits = 766 // after the first; no double has more
	want := decimalOf(text)
	return want == decimalOf(strconv.FormatFloat(f, 'e', -1, 64)) ||
		want == decimalOf(strconv.FormatFloat(f, 'e', allDigits, 64))
}

// decimal is a number in a form that can be compared: digits without zeros at either end, times
// ten to the power of exp. Zero has no digits.
type decimal struct {
	negative bool
	digits   string
	exp      int
}

// decimalOf reads a number in JSON's syntax.
func decimalOf(text string) decimal {
	mantissa, negative := strings.CutPrefix(text, "-")
	exp := 0
	if i := strings.IndexAny(mantissa, "eE"); i >= 0 {
		// An exponent over 64 bits is clamped, and then equals that of no double.
		exp, _ = strconv.Atoi(mantissa[i+1:])
		mantissa = mantissa[:i]
	}
	whole, fraction, _ := strings.Cut(mantissa, ".")
	digits := strings.TrimLeft(whole+fraction, "0")
	exp -= len(fraction)
	trimmed := strings.TrimRight(digits, "0")
	if trimmed == "" {
		return decimal{}
	}
	return decimal{negative, trimmed, exp + len(digits) - len(trimmed)}
}

func setString(to *string, v any) error {
	s, ok := v.(string)
	if !ok {
		return errors.New("is not a string")
	}
	*to = s
	return nil
}

func setReplyTo(p *amqp.Publishing, v any) error {
	// The broker closes the channel: nobody consumes replies on the relay's.
	if v == "amq.rabbitmq.reply-to" {
		return errors.New("is direct reply-to, which works only on the requester's own channel")
	}
	return setString(&p.ReplyTo, v)
}

func setExpiration(p *amqp.Publishing, v any) error {
	n, err := integerOf(v, maxExpiration)
	if err != nil {
		return err
	}
	p.Expiration = strconv.FormatUint(n, 10)
	return nil
}

func setPriority(p *amqp.Publishing, v any) error {
	n, err := integerOf(v, 255)
	if err != nil {
		return err
	}
	p.Priority = uint8(n)
	return nil
}

// integerOf reads an integer from 0 to limit, given as number or as string.
func integerOf(v any, limit uint64) (uint64, error) {
	text, err := scalarText(v)
	if err == nil {
		if n, err := strconv.ParseUint(text, 10, 64); err == nil && n <= limit {
			return n, nil
		}
	}
	return 0, fmt.Errorf("is not an integer from 0 to %d", limit)
}

// checkRoutes checks CC and BCC, which add routing keys. The broker would skip what is no string.
func checkRoutes(v any) error {
	routes, ok := v.([]any)
	if !ok {
		return errors.New("is not a list of strings")
	}
	for _, r := range routes {
		key, ok := r.(string)
		if !ok {
			return errors.New("is not a list of strings")
		}
		if len(key) > maxShortString {
			return fmt.Errorf("holds a routing key of %d bytes, over the limit of %d", len(key), maxShortString)
		}
	}
	return nil
}

// headerFrameBytes returns the length of the content header's payload as amqp091-go encodes it,
// rounded up by the properties that are not set.
func headerFrameBytes(p *amqp.Publishing) int {
	const fixed = 2 + 2 + 8 + 2 + // class, weight, body size, flags
		1 + 1 + 8 + // delivery mode, priority, timestamp
		8 // a length byte for each string below
	return fixed + len(p.ContentType) + len(p.ContentEncoding) + len(p.CorrelationId) + len(p.ReplyTo) +
		len(p.Expiration) + len(p.MessageId) + len(p.Type) + len(p.AppId) + tableBytes(p.Headers)
}

func tableBytes(t amqp.Table) int {
	n := 4
	for key, v := range t {
		n += 1 + len(key) + fieldBytes(v)
	}
	return n
}

// fieldBytes covers the types that fieldOf returns.
func fieldBytes(v any) int {
	switch v := v.(type) {
	case nil:
		return 1
	case bool:
		return 1 + 1
	case string:
		return 1 + 4 + len(v)
	case []any:
		n := 1 + 4
		for _, item := range v {
			n += fieldBytes(item)
		}
		return n
	case amqp.Table:
		return 1 + tableBytes(v)
	}
	return 1 + 8 // int64, float64
}
