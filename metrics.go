package main

import (
	"strings"
	"sync"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/promauto"
)

// Cause says what made the relay look for events.
type Cause string

const (
	CauseStart     Cause = "start"     // the first look after start or after taking over the work
	CauseNotify    Cause = "notify"    // a notification came
	CauseFallback  Cause = "fallback"  // FALLBACK_INTERVAL passed without one
	CauseRetry     Cause = "retry"     // an event's retry_after has come
	CauseReconnect Cause = "reconnect" // a link is back; notifications may have been lost meanwhile
	CauseAwake     Cause = "awake"     // a poll while writers stay silent
)

var causes = []Cause{CauseStart, CauseNotify, CauseFallback, CauseRetry, CauseReconnect, CauseAwake}

// Peer is a server's end that the relay keeps a link to. The listener has its own, since it is a
// connection of its own that can be down alone.
type Peer string

const (
	PeerPostgres Peer = "postgres"
	PeerListener Peer = "listener"
	PeerRabbitMQ Peer = "rabbitmq"
)

var peers = []Peer{PeerPostgres, PeerListener, PeerRabbitMQ}

// Doorbell is what writers meet when they commit.
type Doorbell string

const (
	Asleep Doorbell = "asleep" // every commit rings
	Awake  Doorbell = "awake"  // writers are silent, the relay polls
	Deaf   Doorbell = "deaf"   // writers are silent, the relay cannot or may not publish
)

var doorbells = []Doorbell{Asleep, Awake, Deaf}

const (
	// maxFailedTypes bounds the series of outbox_events_failed_total: event types come from rows.
	maxFailedTypes  = 100
	otherFailedType = "other"
)

// Metrics holds every series of the relay, all made at zero so that rates exist from the first
// scrape. Children of labels are resolved once: nothing is looked up for an event that succeeds.
// Safe for concurrent use; make it with newMetrics.
type Metrics struct {
	Published    prometheus.Counter
	Outcomes     [len(outcomeNames)]prometheus.Counter // by Outcome
	InFlight     prometheus.Gauge
	PublishDelay prometheus.Observer // seconds from created_at to confirm
	LastConfirm  prometheus.Gauge    // Unix time in seconds

	BatchDuration prometheus.Observer // seconds from claim to settle, of each event
	BatchEvents   prometheus.Observer
	Claims        prometheus.Counter
	Settles       prometheus.Counter
	SettleSkipped prometheus.Counter

	Pending          prometheus.Gauge
	OldestPendingAge prometheus.Gauge // seconds; 0 when nothing is pending
	DeadLetters      prometheus.Gauge
	HeldAggregates   prometheus.Gauge
	BacklogSampled   prometheus.Gauge // Unix time in seconds

	RetentionDeleted prometheus.Counter

	Wakeups         map[Cause]prometheus.Counter
	DoorbellRefused prometheus.Gauge // seconds; 0 when sleep is not refused
	ListenHealthy   prometheus.Gauge // 0 or 1

	Connected          map[Peer]prometheus.Gauge // 0 or 1
	Reconnects         map[Peer]prometheus.Counter
	ConnectionFailures map[Peer]prometheus.Counter
	Blocked            prometheus.Gauge // 0 or 1
	Leader             prometheus.Gauge // 0 or 1
	Paused             prometheus.Gauge // 0 or 1

	doorbell map[Doorbell]prometheus.Gauge
	failed   *prometheus.CounterVec

	mu          sync.Mutex // guards failedTypes; nothing slow runs under it
	failedTypes map[string]prometheus.Counter
}

// newMetrics makes the metrics and registers them with reg. It panics when they are registered
// there already.
func newMetrics(reg prometheus.Registerer) *Metrics {
	f := promauto.With(reg)
	counter := func(name, help string) prometheus.Counter {
		return f.NewCounter(prometheus.CounterOpts{Name: name, Help: help})
	}
	gauge := func(name, help string) prometheus.Gauge {
		return f.NewGauge(prometheus.GaugeOpts{Name: name, Help: help})
	}
	counters := func(name, help, label string) *prometheus.CounterVec {
		return f.NewCounterVec(prometheus.CounterOpts{Name: name, Help: help}, []string{label})
	}
	gauges := func(name, help, label string) *prometheus.GaugeVec {
		return f.NewGaugeVec(prometheus.GaugeOpts{Name: name, Help: help}, []string{label})
	}
	histogram := func(name, help string, buckets []float64) prometheus.Histogram {
		return f.NewHistogram(prometheus.HistogramOpts{Name: name, Help: help, Buckets: buckets})
	}

	m := &Metrics{
		Published: counter("outbox_events_published_total", "Events the broker confirmed and that were not returned."),
		InFlight:  gauge("outbox_in_flight_events", "Events in hand of which it is not known yet what became of them: written to the broker, or about to be."),
		PublishDelay: histogram("outbox_publish_delay_seconds",
			"Time from an event's created_at, the start of its transaction, to the broker's confirm.",
			[]float64{.0005, .001, .002, .003, .005, .01, .02, .05, .1, .2, .5, 1, 2, 5, 10, 30, 60, 120, 300, 600}),
		LastConfirm: gauge("outbox_last_confirm_timestamp_seconds", "When the broker last confirmed an event; 0 before the first."),

		BatchDuration: histogram("outbox_batch_duration_seconds", "Time from claim to settle, of each event.",
			[]float64{.001, .002, .005, .01, .02, .05, .1, .2, .5, 1, 2, 5, 10, 30}),
		BatchEvents: histogram("outbox_batch_events", "Events in a batch.",
			[]float64{1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000}),
		Claims:        counter("outbox_claims_total", "Looks for events in the table, those that found none included."),
		Settles:       counter("outbox_settles_total", "Commits that marked what became of events."),
		SettleSkipped: counter("outbox_settle_skipped_total", "Rows a settle left for later because another session had locked them."),

		Pending:          gauge("outbox_events_pending", "Events neither processed nor dead, when last counted."),
		OldestPendingAge: gauge("outbox_oldest_pending_age_seconds", "Age of the oldest pending event, when last counted; 0 when none is pending."),
		DeadLetters:      gauge("outbox_dead_letters", "Dead letters in the table, when last counted."),
		HeldAggregates:   gauge("outbox_held_aggregates", "Aggregates of which events wait behind a failed one, or with ON_DEAD_LETTER=hold a dead one; among the 10,000 events that wait longest. When last counted."),
		BacklogSampled:   gauge("outbox_backlog_sample_timestamp_seconds", "When pending events and dead letters were last counted; 0 before the first time."),

		RetentionDeleted: counter("outbox_retention_deleted_total", "Processed events this relay deleted because they were older than RETENTION."),

		DoorbellRefused: gauge("outbox_doorbell_refused_seconds", "How long open transactions of writers have kept the relay from falling asleep; 0 when they do not."),
		ListenHealthy:   gauge("outbox_listen_healthy", "1 when the last proof that notifications arrive succeeded."),

		Blocked: gauge("outbox_broker_blocked", "1 while the broker blocks publishing, a memory or disk alarm say."),
		Leader:  gauge("outbox_leader", "1 while this relay holds the work lock and may publish."),
		Paused:  gauge("outbox_paused", "1 while the outbox is paused by an operator; of relays that work."),

		Wakeups:            make(map[Cause]prometheus.Counter),
		Connected:          make(map[Peer]prometheus.Gauge),
		Reconnects:         make(map[Peer]prometheus.Counter),
		ConnectionFailures: make(map[Peer]prometheus.Counter),
		doorbell:           make(map[Doorbell]prometheus.Gauge),

		failed:      counters("outbox_events_failed_total", "Failed attempts of events, by event type; types beyond the first 100 count as other.", "event_type"),
		failedTypes: make(map[string]prometheus.Counter),
	}

	outcomes := counters("outbox_event_outcomes_total", "What became of events handed to the publisher.", "outcome")
	for o, name := range outcomeNames {
		m.Outcomes[o] = outcomes.WithLabelValues(name)
	}
	wakeups := counters("outbox_wakeups_total", "What made the relay look for events.", "cause")
	for _, c := range causes {
		m.Wakeups[c] = wakeups.WithLabelValues(string(c))
	}
	connected := gauges("outbox_connected", "1 while the link to the server is up.", "server")
	reconnects := counters("outbox_reconnects_total", "Links made anew after one was lost.", "server")
	failures := counters("outbox_connection_failures_total", "Attempts to connect that failed, and links that were lost.", "server")
	for _, p := range peers {
		m.Connected[p] = connected.WithLabelValues(string(p))
		m.Reconnects[p] = reconnects.WithLabelValues(string(p))
		m.ConnectionFailures[p] = failures.WithLabelValues(string(p))
	}
	doorbell := gauges("outbox_doorbell_state", "1 for the state the doorbell is in: asleep (every commit rings), awake (the relay polls), deaf (it cannot publish).", "state")
	for _, d := range doorbells {
		m.doorbell[d] = doorbell.WithLabelValues(string(d))
	}
	m.SetDoorbell(Deaf) // until the relay works, nobody hears
	m.failedTypes[otherFailedType] = m.failed.WithLabelValues(otherFailedType)
	return m
}

// SetDoorbell makes state the one that reads 1.
func (m *Metrics) SetDoorbell(state Doorbell) {
	for d, g := range m.doorbell {
		if d == state {
			g.Set(1)
		} else {
			g.Set(0)
		}
	}
}

// EndTenure resets what only a relay with the work lock knows.
func (m *Metrics) EndTenure() {
	for _, g := range []prometheus.Gauge{m.Leader, m.Paused, m.ListenHealthy, m.DoorbellRefused, m.Connected[PeerPostgres]} {
		g.Set(0)
	}
	m.SetDoorbell(Deaf)
}

// CountFailed counts one failed attempt of an event of that type.
func (m *Metrics) CountFailed(eventType string) { m.failedCounter(eventType).Inc() }

func (m *Metrics) failedCounter(eventType string) prometheus.Counter {
	m.mu.Lock()
	defer m.mu.Unlock()
	if c, ok := m.failedTypes[eventType]; ok {
		return c
	}
	if len(m.failedTypes) > maxFailedTypes { // "other" is one of them and not counted
		return m.failedTypes[otherFailedType]
	}
	// A database in SQL_ASCII may hold any bytes, and a label that is not UTF-8 panics.
	c := m.failed.WithLabelValues(strings.ToValidUTF8(eventType, "\uFFFD"))
	m.failedTypes[eventType] = c
	return c
}

// set01 turns a condition into the value of a gauge that says yes or no.
func set01(g prometheus.Gauge, yes bool) {
	if yes {
		g.Set(1)
	} else {
		g.Set(0)
	}
}
