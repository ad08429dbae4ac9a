package main

import (
	"math"
	"reflect"
	"strings"
	"testing"

	amqp "github.com/rabbitmq/amqp091-go"
)

// checkTable compares with reflect, which also compares the types: int64(1) is not 1.0.
func checkTable(tb testing.TB, got, want amqp.Table) {
	tb.Helper()
	if !reflect.DeepEqual(got, want) {
		tb.Errorf("headers = %#v, want %#v", got, want)
	}
}

func TestHeadersAreCopied(t *testing.T) {
	t.Parallel()
	tests := []struct {
		name, headers string
		want          amqp.Table // beside the relay's own three
	}{
		{"JSON null is no headers", `null`, amqp.Table{}},
		{"an empty object is no headers", `{}`, amqp.Table{}},
		{"strings pass through", `{"traceparent":"00-4bf9-00f0-01","":"empty name"}`, amqp.Table{"traceparent": "00-4bf9-00f0-01", "": "empty name"}},
		{"nested values stay nested", `{"a":[1,"x",null,{"b":true}],"n":{"m":1.5}}`, amqp.Table{
			"a": []any{int64(1), "x", nil, amqp.Table{"b": true}}, "n": amqp.Table{"m": 1.5},
		}},
		{"null, booleans and empty values stay", `{"n":null,"t":true,"f":false,"l":[],"o":{}}`, amqp.Table{
			"n": nil, "t": true, "f": false, "l": []any{}, "o": amqp.Table{},
		}},
		{"a reserved name is free below the top", `{"o":{"attempt":7,"priority":"high"}}`, amqp.Table{"o": amqp.Table{"attempt": int64(7), "priority": "high"}}},
		{"names are compared with case", `{"Priority":"high","Attempt":1,"cc":"x"}`, amqp.Table{"Priority": "high", "Attempt": int64(1), "cc": "x"}},
		{"CC and BCC are lists of routing keys", `{"CC":["a","b"],"BCC":[]}`, amqp.Table{"CC": []any{"a", "b"}, "BCC": []any{}}},
		{"null leaves out what the broker reads", `{"CC":null,"BCC":null,"x-stream-filter-value":null}`, amqp.Table{}},
		{"a stream filter is a string", `{"x-stream-filter-value":"eu"}`, amqp.Table{"x-stream-filter-value": "eu"}},
		{"white space may follow", "{\"a\":1} \n", amqp.Table{"a": int64(1)}},
		{"a name of 255 bytes is fine", `{"` + strings.Repeat("n", 255) + `":1}`, amqp.Table{strings.Repeat("n", 255): int64(1)}},
		{"nesting to the limit is fine", `{"d":` + strings.Repeat("[", 32) + strings.Repeat("]", 32) + `}`, amqp.Table{"d": nested(32)}},
	}
	m := testMapper(t, "outbox", "{event_type}")
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			e := testEvent()
			e.Headers = []byte(tt.headers)
			msg, err := m.message(e)
			if err != nil {
				t.Fatal(err)
			}
			tt.want["aggregate_type"], tt.want["aggregate_id"], tt.want["attempt"] = "order", "42", int64(1)
			checkTable(t, msg.publishing.Headers, tt.want)
			checkMessage(t, msg)
		})
	}
}

func nested(depth int) any {
	list := []any{}
	for range depth - 1 {
		list = []any{list}
	}
	return list
}

func TestHeadersSetProperties(t *testing.T) {
	t.Parallel()
	tests := []struct {
		name, headers string
		mutate        func(want *amqp.Publishing)
	}{
		{"a content type wins over the column's", `{"content-type":"application/cloudevents+json"}`, func(p *amqp.Publishing) { p.ContentType = "application/cloudevents+json" }},
		{"an empty content type is none", `{"content-type":""}`, func(p *amqp.Publishing) { p.ContentType = "" }},
		{"a content encoding", `{"content-encoding":"gzip"}`, func(p *amqp.Publishing) { p.ContentEncoding = "gzip" }},
		{"a correlation id", `{"correlation-id":"c-1"}`, func(p *amqp.Publishing) { p.CorrelationId = "c-1" }},
		{"a correlation id that is a number keeps its digits", `{"correlation-id":12345678901234567890.10}`, func(p *amqp.Publishing) { p.CorrelationId = "12345678901234567890.10" }},
		{"a reply address", `{"reply-to":"answers"}`, func(p *amqp.Publishing) { p.ReplyTo = "answers" }},
		{"an expiration as number", `{"expiration":60000}`, func(p *amqp.Publishing) { p.Expiration = "60000" }},
		{"an expiration as string", `{"expiration":"060000"}`, func(p *amqp.Publishing) { p.Expiration = "60000" }},
		{"an expiration of nothing", `{"expiration":0}`, func(p *amqp.Publishing) { p.Expiration = "0" }},
		{"the broker's longest expiration", `{"expiration":315360000000}`, func(p *amqp.Publishing) { p.Expiration = "315360000000" }},
		{"a priority as number", `{"priority":255}`, func(p *amqp.Publishing) { p.Priority = 255 }},
		{"a priority as string", `{"priority":"9"}`, func(p *amqp.Publishing) { p.Priority = 9 }},
		{"null sets nothing", `{"content-type":null,"content-encoding":null,"correlation-id":null,"reply-to":null,"expiration":null,"priority":null}`, func(*amqp.Publishing) {}},
	}
	m := testMapper(t, "outbox", "{event_type}")
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			e := testEvent()
			plain, err := m.message(e)
			if err != nil {
				t.Fatal(err)
			}
			want := plain.publishing
			tt.mutate(&want)
			e.Headers = []byte(tt.headers)
			msg, err := m.message(e)
			if err != nil {
				t.Fatal(err)
			}
			if !reflect.DeepEqual(msg.publishing, want) { // also: no key was copied into the headers
				t.Errorf("publishing = %+v, want %+v", msg.publishing, want)
			}
		})
	}
}

func TestHeadersAreRejected(t *testing.T) {
	t.Parallel()
	const secret = "s3cret"
	long := strings.Repeat("k", 256)
	tests := []struct{ name, headers, wantErr string }{
		{"a string is no object", `"` + secret + `"`, "headers are not a JSON object"},
		{"a list is no object", `["` + secret + `"]`, "headers are not a JSON object"},
		{"a number is no object", `5`, "headers are not a JSON object"},
		{"a boolean is no object", `true`, "headers are not a JSON object"},
		{"no JSON at all", secret, "headers are not valid JSON"},
		{"a cut object", `{"a":"` + secret, "headers are not valid JSON"},
		{"two values", `{} {"a":"` + secret + `"}`, "followed by more"},
		{"text after the object", `{}` + secret, "followed by more"},
		{"more JSON than could fit", `{"a":"` + strings.Repeat(" ", 1<<20) + `"}`, "headers are 1048584 bytes of JSON, over the limit of 1048576"},
		{"our aggregate_type", `{"aggregate_type":"` + secret + `"}`, `header "aggregate_type" is reserved`},
		{"our aggregate_id", `{"aggregate_id":"` + secret + `"}`, `header "aggregate_id" is reserved`},
		{"our attempt", `{"attempt":1}`, `header "attempt" is reserved`},
		{"our name with null", `{"attempt":null}`, `header "attempt" is reserved`},
		{"a property that is the relay's", `{"message-id":"` + secret + `"}`, `header "message-id" is reserved`},
		{"a property that the broker checks", `{"user-id":"` + secret + `"}`, `header "user-id" is reserved`},
		{"a name too long", `{"` + long + `":"` + secret + `"}`, `has a name of 256 bytes, over the limit of 255`},
		{"a nested name too long", `{"o":[{"` + long + `":"` + secret + `"}]}`, `header "o" holds a name of 256 bytes, over the limit of 255`},
		{"nesting too deep", `{"d":` + strings.Repeat("[", 33) + strings.Repeat("]", 33) + `}`, `header "d" is nested more than 32 deep`},
		{"objects nested too deep", `{"d":` + strings.Repeat(`{"a":`, 33) + "1" + strings.Repeat("}", 33) + `}`, `header "d" is nested more than 32 deep`},
		{"a number no double holds", `{"n":12345678901234567890.1}`, `header "n" has a number`},
		{"a nested number no double holds", `{"o":{"l":[12345678901234567890]}}`, `header "o" has a number`},
		{"a content type that is no string", `{"content-type":5}`, `header "content-type" is not a string`},
		{"a content encoding that is no string", `{"content-encoding":["` + secret + `"]}`, `header "content-encoding" is not a string`},
		{"a content encoding too long", `{"content-encoding":"` + long + `"}`, `content-encoding is 256 bytes, over the limit of 255`},
		{"a correlation id that is an object", `{"correlation-id":{"a":"` + secret + `"}}`, `header "correlation-id" is not a string, a number`},
		{"a correlation id too long", `{"correlation-id":"` + long + `"}`, `correlation-id is 256 bytes`},
		{"a reply address that is no string", `{"reply-to":false}`, `header "reply-to" is not a string`},
		{"a reply address too long", `{"reply-to":"` + long + `"}`, `reply-to is 256 bytes`},
		{"direct reply-to", `{"reply-to":"amq.rabbitmq.reply-to"}`, `header "reply-to" is direct reply-to`},
		{"an expiration that is no number", `{"expiration":"` + secret + `"}`, `header "expiration" is not an integer from 0 to 315360000000`},
		{"a negative expiration", `{"expiration":-1}`, `header "expiration" is not an integer`},
		{"an expiration with a fraction", `{"expiration":1.5}`, `header "expiration" is not an integer`},
		{"an empty expiration", `{"expiration":""}`, `header "expiration" is not an integer`},
		{"an expiration over the broker's limit", `{"expiration":315360000001}`, `header "expiration" is not an integer`},
		{"an expiration over 64 bits", `{"expiration":"99999999999999999999"}`, `header "expiration" is not an integer`},
		{"an expiration that is a list", `{"expiration":[1]}`, `header "expiration" is not an integer`},
		{"a priority over a byte", `{"priority":256}`, `header "priority" is not an integer from 0 to 255`},
		{"a priority that is a boolean", `{"priority":true}`, `header "priority" is not an integer`},
		{"CC that is a string", `{"CC":"` + secret + `"}`, `header "CC" is not a list of strings`},
		{"CC with a number", `{"CC":["a",1]}`, `header "CC" is not a list of strings`},
		{"BCC that is an object", `{"BCC":{}}`, `header "BCC" is not a list of strings`},
		{"BCC with a key too long", `{"BCC":["` + long + `"]}`, `header "BCC" holds a routing key of 256 bytes, over the limit of 255`},
		{"a stream filter that is a number", `{"x-stream-filter-value":1}`, `header "x-stream-filter-value" is not a string`},
		{"headers that do not fit a frame", `{"a":"` + strings.Repeat("x", 128_000) + `"}`, "bytes encoded, over the limit of 128000"},
	}
	m := testMapper(t, "outbox", "{event_type}")
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			e := testEvent()
			e.Headers = []byte(tt.headers)
			_, err := m.message(e)
			checkErr(t, err, tt.wantErr)
			if err != nil && (strings.Contains(err.Error(), secret) || len(err.Error()) > 200) {
				t.Errorf("error quotes a value or is too long to store: %q", err)
			}
		})
	}
}

func TestHeaderNumbers(t *testing.T) {
	t.Parallel()
	tests := []struct {
		text string
		want any // nil: rejected
	}{
		{"0", int64(0)},
		{"-0", int64(0)},
		{"9223372036854775807", int64(math.MaxInt64)},
		{"-9223372036854775808", int64(math.MinInt64)},
		{"9007199254740993", int64(1<<53 + 1)}, // what a double cannot hold
		{"1.0", 1.0},
		{"0.1", 0.1}, // no double equals it, but every reader prints it so
		{"-1.50", -1.5},
		{"0.00", 0.0},
		{"1e3", 1000.0},
		{"1E+3", 1000.0},
		{"12.5e-1", 1.25},
		{"9223372036854775808", float64(1 << 63)}, // exact, though not the shortest text
		{"18446744073709551615", nil},
		{"100000000000000000000", 1e20},
		{"1" + strings.Repeat("0", 308), 1e308},
		{"1" + strings.Repeat("0", 309), nil}, // over the largest double
		{"12345678901234567890.1", nil},
		{"0.1000000000000000055511151231257827021181583404541015625", 0.1}, // all digits of the double
		{"0.1000000000000000055", nil},
		{"3.141592653589793", math.Pi},
		{"3.14159265358979323846", nil},
		{"5e-324", math.SmallestNonzeroFloat64},
		{"1e-400", nil}, // not zero
		{"0e-400", 0.0},
		{"1e-99999999999999999999", nil},
		{"1e99999999999999999999", nil},
	}
	for _, tt := range tests {
		t.Run(tt.text[:min(len(tt.text), 40)], func(t *testing.T) {
			t.Parallel()
			got, err := numberOf(tt.text)
			if (err != nil) != (tt.want == nil) || got != tt.want {
				t.Errorf("numberOf(%s) = %v (%T), %v; want %v", tt.text, got, got, err, tt.want)
			}
		})
	}
}
