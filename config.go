package main

import (
	"fmt"
	"log/slog"
	"reflect"
	"strings"
	"time"

	"outbox-relay/internal/serverurl"
)

// Config holds every setting of the relay, each in one place: flag, environment variable,
// default, help and bounds stand beside the field. It is a value, validated once, never changed.
//
// Tags beyond kong's: min and max are bounds of numbers and durations, both allowed; enum lists
// what is allowed; secret says how to show the value ("url"); empty:"value" lets an empty variable
// count as a value, where otherwise it counts as unset.
type Config struct {
	DatabaseURL     string `name:"database-url" env:"DATABASE_URL" secret:"url" help:"PostgreSQL, as URL or key=value string. Must reach the server directly, not through a transaction pooler."`
	DatabaseURLFile string `name:"database-url-file" env:"DATABASE_URL_FILE" help:"File that holds DATABASE_URL; read again at each connect."`
	AMQPURL         string `name:"amqp-url" env:"AMQP_URL" secret:"url" help:"RabbitMQ, amqp:// or amqps://; several, separated by commas, are tried in turn."`
	AMQPURLFile     string `name:"amqp-url-file" env:"AMQP_URL_FILE" help:"File that holds AMQP_URL; read again at each connect."`

	AMQPExchange        string `name:"amqp-exchange" env:"AMQP_EXCHANGE" default:"outbox" empty:"value" help:"Exchange to publish to; a template like AMQP_ROUTING_KEY. Empty is the default exchange."`
	AMQPExchangeType    string `name:"amqp-exchange-type" env:"AMQP_EXCHANGE_TYPE" default:"topic" help:"Type the exchange is declared with: topic, direct, fanout, headers, or a plugin's that begins with x-."`
	AMQPDeclare         bool   `name:"amqp-declare" env:"AMQP_DECLARE" default:"true" negatable:"" help:"Declare the exchange, durable; otherwise only check that it exists. A templated, default or amq.* exchange is never declared."`
	AMQPRoutingKey      string `name:"amqp-routing-key" env:"AMQP_ROUTING_KEY" default:"{event_type}" empty:"value" help:"Routing key; a template over {aggregate_type}, {aggregate_id}, {event_type}, {header.NAME}."`
	AMQPMandatory       bool   `name:"amqp-mandatory" env:"AMQP_MANDATORY" default:"true" negatable:"" help:"Treat a message that reaches no queue as failed instead of losing it."`
	AMQPMaxMessageBytes int64  `name:"amqp-max-message-bytes" env:"AMQP_MAX_MESSAGE_BYTES" default:"16777216" min:"1" max:"536870912" help:"Payloads over this many bytes are rejected; the broker's max_message_size."`

	Ordering         string        `name:"ordering" env:"ORDERING" default:"aggregate" enum:"aggregate,none" help:"aggregate: one relay works, in order; none: several work side by side, in no order."`
	AggregateWindow  int           `name:"aggregate-window" env:"AGGREGATE_WINDOW" default:"1" min:"1" max:"10000" help:"Unconfirmed events an aggregate may have; above 1 an event the broker refuses can come after its successors."`
	OnDeadLetter     string        `name:"on-dead-letter" env:"ON_DEAD_LETTER" default:"continue" enum:"continue,hold" help:"What later events of a dead letter's aggregate do: continue, or hold until a person decides."`
	FallbackInterval time.Duration `name:"fallback-interval" env:"FALLBACK_INTERVAL" default:"5s" min:"100ms" max:"1h" help:"How often to look for events that no notification announced."`
	BatchSize        int           `name:"batch-size" env:"BATCH_SIZE" default:"1000" min:"1" max:"100000" help:"Events claimed at once at most."`
	BatchBytes       int64         `name:"batch-bytes" env:"BATCH_BYTES" default:"16777216" min:"1" max:"1073741824" help:"Payload bytes claimed at once at most; one event is always claimed."`
	MaxAttempts      int           `name:"max-attempts" env:"MAX_ATTEMPTS" default:"10" min:"1" max:"1000000" help:"Failed attempts after which an event becomes a dead letter."`
	RetryBase        time.Duration `name:"retry-base" env:"RETRY_BASE" default:"1s" min:"1ms" max:"24h" help:"Wait before the first retry; doubles with each."`
	RetryMax         time.Duration `name:"retry-max" env:"RETRY_MAX" default:"5m" min:"1ms" max:"168h" help:"Longest wait between retries."`
	DeadAfter        time.Duration `name:"dead-after" env:"DEAD_AFTER" default:"1h" min:"0s" max:"8760h" help:"Age below which an event that the broker nacks does not become a dead letter."`
	ConfirmTimeout   time.Duration `name:"confirm-timeout" env:"CONFIRM_TIMEOUT" default:"5s" min:"100ms" max:"10m" help:"How long to wait for the broker's confirm."`
	ShutdownTimeout  time.Duration `name:"shutdown-timeout" env:"SHUTDOWN_TIMEOUT" default:"8s" min:"200ms" max:"1h" help:"How long to finish what is in flight after SIGTERM; above CONFIRM_TIMEOUT, below what the platform grants."`

	Retention string `name:"retention" env:"RETENTION" default:"off" help:"How long processed events stay in the table: off is for good, a duration, or immediate, which deletes instead of marking. Durations from 1s to 87600h."`

	HTTPAddr      string `name:"http-addr" env:"HTTP_ADDR" default:":9090" help:"Address of /metrics, /livez and /readyz."`
	WebConfigFile string `name:"web.config.file" env:"WEB_CONFIG_FILE" help:"TLS and authentication for HTTP, in the Prometheus exporter-toolkit's format."`
	LogLevel      string `name:"log-level" env:"LOG_LEVEL" default:"info" enum:"debug,info,warn,error" help:"Least level that is logged: debug, info, warn or error."`
	LogFormat     string `name:"log-format" env:"LOG_FORMAT" default:"json" enum:"json,text" help:"Form of the log lines: json or text."`
}

// setting is one field of Config: its tags and, when taken from a value, what it holds.
type setting struct {
	name  string // of the environment variable; messages use it for the flag as well
	tag   reflect.StructTag
	value reflect.Value
}

// settings lists the fields in their order.
func (c Config) settings() []setting {
	v := reflect.ValueOf(c)
	all := make([]setting, v.NumField())
	for i := range all {
		tag := v.Type().Field(i).Tag
		all[i] = setting{tag.Get("env"), tag, v.Field(i)}
	}
	return all
}

// LogValue is the effective configuration with secrets reduced to user, host and database, so
// that a Config can be logged. URLs from files are shown as they are now.
func (c Config) LogValue() slog.Value {
	if dsn, err := secret(c.DatabaseURL, c.DatabaseURLFile); err == nil {
		c.DatabaseURL = redacted(dsn)
	}
	if list, err := secret(c.AMQPURL, c.AMQPURLFile); err == nil {
		urls := serverurl.SplitAMQP(list)
		for i, u := range urls {
			urls[i] = redacted(u)
		}
		c.AMQPURL = strings.Join(urls, ",")
	}
	var attrs []slog.Attr
	for _, s := range c.settings() {
		attrs = append(attrs, slog.Any(strings.ToLower(s.name), s.value.Interface()))
	}
	return slog.GroupValue(attrs...)
}

// String is LogValue as text, so that no way of printing a Config shows a password.
func (c Config) String() string { return fmt.Sprint(c.LogValue()) }

// GoString does the same for %#v.
func (c Config) GoString() string { return c.String() }
