package main

import (
	"bufio"
	"encoding/binary"
	"io"
	"net"
	"strings"
	"testing"
	"time"

	amqp "github.com/rabbitmq/amqp091-go"
)

// TestHeaderFrameBytes compares the size that the mapper computes with what the client library
// puts on the wire.
func TestHeaderFrameBytes(t *testing.T) {
	t.Parallel()
	ch, sizes := recordHeaderFrames(t)
	m := testMapper(t, "outbox", "{event_type}")
	for _, headers := range []string{
		``,
		`{"s":"text","t":true,"i":1,"d":1.5,"n":null}`,
		`{"l":[1,"x",null,{"b":true}],"o":{"m":1.5,"o":{"l":[]}}}`,
		`{"content-encoding":"gzip","correlation-id":"c","reply-to":"r","expiration":5,"priority":1}`,
		`{"s":"` + strings.Repeat("x", 127_700) + `"}`,
	} {
		e := testEvent()
		e.Headers = []byte(headers)
		msg, err := m.message(e)
		if err != nil {
			t.Fatal(err)
		}
		p := msg.publishing
		if err := ch.Publish(msg.exchange, msg.key, true, false, p); err != nil {
			t.Fatal(err)
		}
		computed, wire := headerFrameBytes(&p), <-sizes
		if spare := computed - wire; spare < 0 || spare > 10 { // unset properties: at most 10 bytes
			t.Errorf("headers %.60s: computed %d bytes, the wire has %d", headers, computed, wire)
		}
	}
}

// What the client library needs to put a message on the wire; the peer's reading is part of it.
func BenchmarkEncodeMessage(b *testing.B) {
	ch, sizes := recordHeaderFrames(b)
	m := testMapper(b, "outbox", "{event_type}")
	msg, err := m.message(testEvent())
	if err != nil {
		b.Fatal(err)
	}
	b.ReportAllocs()
	for b.Loop() {
		if err := ch.Publish(msg.exchange, msg.key, true, false, msg.publishing); err != nil {
			b.Fatal(err)
		}
		<-sizes
	}
}

// recordHeaderFrames returns a channel to a peer that accepts everything and reports the length
// of each content header's payload.
func recordHeaderFrames(t testing.TB) (*amqp.Channel, <-chan int) {
	t.Helper()
	client, server := net.Pipe()
	sizes := make(chan int, 1)
	done := make(chan struct{})
	go func() {
		defer close(done)
		serveAMQP(server, sizes)
	}()
	t.Cleanup(func() {
		client.Close()
		server.Close()
		<-done
	})
	conn, err := amqp.Open(client, amqp.Config{SASL: []amqp.Authentication{&amqp.PlainAuth{}}, Heartbeat: time.Hour})
	if err != nil {
		t.Fatal(err)
	}
	ch, err := conn.Channel()
	if err != nil {
		t.Fatal(err)
	}
	return ch, sizes
}

// serveAMQP speaks just enough of the broker's side to let a client publish, until the
// connection ends.
func serveAMQP(conn net.Conn, headerSizes chan<- int) {
	const methodFrame, headerFrame, frameEnd = 1, 2, 0xCE
	send := func(channel uint16, class, method uint16, args string) {
		f := []byte{methodFrame}
		f = binary.BigEndian.AppendUint16(f, channel)
		f = binary.BigEndian.AppendUint32(f, uint32(4+len(args)))
		f = binary.BigEndian.AppendUint16(f, class)
		f = binary.BigEndian.AppendUint16(f, method)
		f = append(append(f, args...), frameEnd)
		_, _ = conn.Write(f) // the next read fails if this did
	}
	r := bufio.NewReader(conn)
	if _, err := r.Discard(len("AMQP\x00\x00\x09\x01")); err != nil {
		return
	}
	send(0, 10, 10, "\x00\x09"+"\x00\x00\x00\x00"+"\x00\x00\x00\x05PLAIN"+"\x00\x00\x00\x05en_US") // connection.start
	for {
		var head [7]byte
		if _, err := io.ReadFull(r, head[:]); err != nil {
			return
		}
		payload := make([]byte, binary.BigEndian.Uint32(head[3:]))
		if _, err := io.ReadFull(r, payload); err != nil {
			return
		}
		if _, err := r.Discard(1); err != nil { // frame end
			return
		}
		channel := binary.BigEndian.Uint16(head[1:])
		switch {
		case head[0] == headerFrame:
			headerSizes <- len(payload)
		case head[0] != methodFrame:
		case strings.HasPrefix(string(payload), "\x00\x0a\x00\x0b"): // connection.start-ok
			send(0, 10, 30, "\x00\x00"+"\x00\x02\x00\x00"+"\x00\x00") // connection.tune
		case strings.HasPrefix(string(payload), "\x00\x0a\x00\x28"): // connection.open
			send(0, 10, 41, "\x00")
		case strings.HasPrefix(string(payload), "\x00\x14\x00\x0a"): // channel.open
			send(channel, 20, 11, "\x00\x00\x00\x00")
		}
	}
}
