package bench

import (
	"fmt"
	"strconv"
	"testing"
	"time"

	"outbox-relay/internal/testenv"
)

// scenarios returns all that can be measured. Those behind figures that are promised run unless -only chooses others, what
// takes minutes once; the others are optional.
func scenarios(srv *servers, rates []int) []scenario {
	var all []scenario
	for _, rate := range rates {
		all = append(all, delays(rate), waking(rate))
	}
	b := batch{events: *drain, aggregates: *aggregates, bytes: *payload}
	all = append(all, draining(b), srv.writing(),
		scenario{
			name: "memory", once: true,
			variants: []variant{{"relay", backlog{batch: b.of(*memory), start: startRelay()}.measure}},
			rows:     []row{{"resident memory while draining", "MB", "rss_mb", "relay", "", goal{value: 40 + 16.8, most: true}}},
		},
		tables(b), recoveries(), idling(), hot(b), queues(b), retention(b))
	for _, bytes := range []int{200, 2 << 10, 100 << 10} {
		all = append(all, payloads(b, bytes))
	}
	return all
}

// of is b with another number of events.
func (b batch) of(events int) batch {
	b.events = events
	return b
}

func delays(rate int) scenario {
	s := scenario{name: fmt.Sprintf("delay %d/s", rate), variants: []variant{
		{"relay", delay(rate, startRelay())},
		{"floor", delay(rate, startFloor)},
	}}
	p50, p99 := goal{}, goal{}
	if rate <= 200 { // more is beyond a plain relay
		s.variants = append(s.variants, variant{"plain", delay(rate, startPlain)})
		p50, p99 = goal{ratio: 1.6, most: true}, goal{ratio: 3, most: true}
	}
	s.rows = []row{
		{"commit to consumer, p50", "ms", "p50_ms", "relay", "floor", p50},
		{"commit to consumer, p99", "ms", "p99_ms", "relay", "floor", p99},
		{"the same of a plain relay, p50", "ms", "p50_ms", "plain", "floor", goal{}},
		{"the same of a plain relay, p99", "ms", "p99_ms", "plain", "floor", goal{}},
	}
	if *against != "" {
		s.variants = append(s.variants, variant{"other", delay(rate, startOther)})
		s.rows = append(s.rows,
			row{"beside the other build, p50", "ms", "p50_ms", "relay", "other", goal{}},
			row{"beside the other build, p99", "ms", "p99_ms", "relay", "other", goal{}})
	}
	return s
}

// waking shows what the doorbell is worth at a rate, and whether the relay wakes at the right one. A build that
// always polls may be set against it: one whose wakeShare and sleepShare are -1.
func waking(rate int) scenario {
	const doorbell, always = "doorbell", "always notify"
	s := scenario{
		name: fmt.Sprintf("waking %d/s", rate), optional: true,
		variants: []variant{
			{doorbell, delay(rate, startRelay())},
			{always, delay(rate, func(t *testing.T, o outbox) *testenv.Process {
				testenv.Exec(t, o.dsn, alwaysNotify)
				return startRelay()(t, o)
			})},
		},
	}
	beside := []string{always}
	if *against != "" {
		s.variants = append(s.variants, variant{"other", delay(rate, startOther)})
		beside = append(beside, "other")
	}
	for _, v := range beside {
		s.rows = append(s.rows,
			row{"commit to consumer, p50", "ms", "p50_ms", doorbell, v, goal{}},
			row{"commit to consumer, p99", "ms", "p99_ms", doorbell, v, goal{}},
			row{"transaction of the writer, p50", "ms", "write_p50_ms", doorbell, v, goal{}},
			row{"transaction of the writer, p99", "ms", "write_p99_ms", doorbell, v, goal{}})
	}
	return s
}

func draining(b batch) scenario {
	s := scenario{
		name: "drain",
		variants: []variant{
			{"relay", backlog{batch: b, start: startRelay()}.measure},
			{"ceiling", ceiling(b)},
			{"plain", backlog{batch: b.of(min(b.events, 2000)), start: startPlain}.measure},
		},
		rows: []row{
			{"drain, in order", "events/s", "rate", "relay", "ceiling", goal{ratio: 0.95}},
			{"the same of a plain relay", "events/s", "rate", "plain", "ceiling", goal{}},
			{"CPU of the relay while draining", "us/event", "cpu_us", "relay", "", goal{value: 15, most: true}},
		},
	}
	if *against != "" {
		s.variants = append(s.variants, variant{"other", backlog{batch: b, start: startOther}.measure})
		s.rows = append(s.rows,
			row{"beside the other build", "events/s", "rate", "relay", "other", goal{}},
			row{"CPU beside the other build", "us/event", "cpu_us", "relay", "other", goal{}})
	}
	return s
}

func (s *servers) writing() scenario {
	return scenario{
		name: "writers",
		variants: []variant{
			{"no trigger", s.write(noTrigger, nil)},
			{"silent doorbell", s.write("", nil)}, // the lock is free, as while a relay is awake
			{"relay, no trigger", s.write(noTrigger, startRelay("FALLBACK_INTERVAL=100ms"))},
			{"relay, doorbell", s.write("", startRelay())},
			{"relay, always notify", s.write(alwaysNotify, startRelay())},
		},
		rows: []row{
			{"32 writers beside a silent doorbell", "tx/s", "rate", "silent doorbell", "no trigger", goal{ratio: 0.9}},
			{"32 writers beside a busy relay", "tx/s", "rate", "relay, doorbell", "relay, no trigger", goal{ratio: 0.9}},
			{"the same, each commit notifies", "tx/s", "rate", "relay, always notify", "relay, no trigger", goal{}},
		},
	}
}

func tables(b batch) scenario {
	relay := startRelay()
	some := *rows / 10
	return scenario{
		name: "tables", once: true,
		variants: []variant{
			{"empty", backlog{batch: b, start: relay}.measure},
			{"processed rows", backlog{batch: b, start: relay, prepare: processedRows(*rows)}.measure},
			{"blocked followers", backlog{batch: b, start: relay, prepare: blockedRows(some)}.measure},
			{"many events", backlog{batch: b.of(some), start: relay}.measure},
			{"old snapshot", backlog{batch: b.of(some), start: relay, prepare: oldSnapshot}.measure},
		},
		rows: []row{
			{fmt.Sprintf("drain beside %d processed rows", *rows), "events/s", "rate", "processed rows", "empty", goal{ratio: 0.8}},
			{fmt.Sprintf("drain beside %d followers of a failed event", some), "events/s", "rate", "blocked followers", "empty", goal{ratio: 0.8}},
			{fmt.Sprintf("drain %d events under an old snapshot", some), "events/s", "rate", "old snapshot", "many events", goal{ratio: 0.8}},
		},
	}
}

func recoveries() scenario {
	outage := time.Minute
	if !*full {
		outage = time.Second
	}
	s := scenario{name: "recovery", once: true, variants: []variant{
		{"leader killed", recovery(leaderKilled, 0)},
		{"broker back", recovery(brokerRestarted, outage)},
		{"database back", recovery(databaseRestarted, outage)},
	}}
	for _, v := range s.variants {
		s.rows = append(s.rows, row{v.name + " to the next delivery", "s", "next_s", v.name, "", goal{value: 1.5, most: true}})
	}
	return s
}

func idling() scenario {
	length := time.Minute
	if !*full {
		length = 3 * time.Second
	}
	return scenario{
		name: "idle", once: true, variants: []variant{{"relay", idle(length)}},
		rows: []row{
			{"transactions of an idle relay", "1/s", "transactions", "relay", "", goal{}},
			{"CPU of an idle relay", "ms/s", "cpu_ms", "relay", "", goal{}},
			{"resident memory of an idle relay", "MB", "rss_mb", "relay", "", goal{}},
		},
	}
}

func hot(b batch) scenario {
	s := scenario{name: "hot", optional: true}
	for _, window := range []string{"1", "10", "50"} {
		one := batch{events: b.events / 6, aggregates: 1, bytes: b.bytes}
		s.variants = append(s.variants, variant{"window " + window, backlog{batch: one, start: startRelay("AGGREGATE_WINDOW=" + window)}.measure})
		s.rows = append(s.rows, row{"drain of one aggregate, AGGREGATE_WINDOW=" + window, "events/s", "rate", "window " + window, "window 1", goal{}})
	}
	return s
}

func payloads(b batch, bytes int) scenario {
	b.bytes = bytes
	b.events = min(b.events, 200_000_000/bytes)
	return scenario{
		name: "payload " + strconv.Itoa(bytes), optional: true,
		variants: []variant{{"relay", backlog{batch: b, start: startRelay()}.measure}, {"ceiling", ceiling(b)}},
		rows: []row{
			{"drain", "events/s", "rate", "relay", "ceiling", goal{}},
			{"resident memory while draining", "MB", "rss_mb", "relay", "", goal{}},
		},
	}
}

func queues(b batch) scenario {
	quorum := b
	quorum.queueType = "quorum"
	return scenario{
		name: "queues", optional: true,
		variants: []variant{
			{"classic", backlog{batch: b, start: startRelay()}.measure},
			{"quorum", backlog{batch: quorum, start: startRelay()}.measure},
			{"quorum, ceiling", ceiling(quorum)},
		},
		rows: []row{
			{"drain to a quorum queue", "events/s", "rate", "quorum", "quorum, ceiling", goal{}},
			{"beside a classic queue", "events/s", "rate", "quorum", "classic", goal{}},
		},
	}
}

func retention(b batch) scenario {
	s := scenario{name: "retention", optional: true, variants: []variant{
		{"off", backlog{batch: b, start: startRelay("RETENTION=off")}.measure},
		{"1s", backlog{batch: b, start: startRelay("RETENTION=1s"), emptied: true}.measure},
		{"immediate", backlog{batch: b, start: startRelay("RETENTION=immediate"), emptied: true}.measure},
	}}
	for _, v := range s.variants {
		s.rows = append(s.rows,
			row{"WAL of what comes after the insert, RETENTION=" + v.name, "bytes/event", "wal_bytes", v.name, "off", goal{}},
			row{"size of table and indexes at the end", "MB", "table_mb", v.name, "off", goal{}},
			row{"drain", "events/s", "rate", v.name, "off", goal{}})
	}
	return s
}

// startOther runs the build that -against names.
func startOther(t *testing.T, o outbox) *testenv.Process {
	t.Helper()
	t.Setenv("RELAY_BINARY", *against)
	return startRelay()(t, o)
}
