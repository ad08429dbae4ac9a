package main

import "time"

// Config holds every setting of the relay, each in one place: flag, environment variable,
// default, unit and help stand beside the field. It is a value, validated once, never changed.
type Config struct {
	DatabaseURL     string `name:"database-url" env:"DATABASE_URL" help:"PostgreSQL, as URL or key=value string. Must reach the server directly, not through a transaction pooler."`
	DatabaseURLFile string `name:"database-url-file" env:"DATABASE_URL_FILE" help:"File that holds DATABASE_URL; read again at each connect."`
	AMQPURL         string `name:"amqp-url" env:"AMQP_URL" help:"RabbitMQ, amqp:// or amqps://; several, separated by commas, are tried in turn."`
	AMQPURLFile     string `name:"amqp-url-file" env:"AMQP_URL_FILE" help:"File that holds AMQP_URL; read again at each connect."`

	AMQPExchange        string `name:"amqp-exchange" env:"AMQP_EXCHANGE" default:"outbox" help:"Exchange to publish to; a template like AMQP_ROUTING_KEY. Empty is the default exchange."`
	AMQPExchangeType    string `name:"amqp-exchange-type" env:"AMQP_EXCHANGE_TYPE" default:"topic" help:"Type the exchange is declared with."`
	AMQPDeclare         bool   `name:"amqp-declare" env:"AMQP_DECLARE" default:"true" negatable:"" help:"Declare the exchange, durable; otherwise only check that it exists."`
	AMQPRoutingKey      string `name:"amqp-routing-key" env:"AMQP_ROUTING_KEY" default:"{event_type}" help:"Routing key; a template over {aggregate_type}, {aggregate_id}, {event_type}, {header.NAME}."`
	AMQPMandatory       bool   `name:"amqp-mandatory" env:"AMQP_MANDATORY" default:"true" negatable:"" help:"Treat a message that reaches no queue as failed instead of losing it."`
	AMQPMaxMessageBytes int64  `name:"amqp-max-message-bytes" env:"AMQP_MAX_MESSAGE_BYTES" default:"16777216" help:"Payloads over this many bytes are rejected; the broker's max_message_size."`

	Ordering         string        `name:"ordering" env:"ORDERING" default:"aggregate" enum:"aggregate,none" help:"aggregate: one relay works, in order; none: several work side by side, in no order."`
	AggregateWindow  int           `name:"aggregate-window" env:"AGGREGATE_WINDOW" default:"1" help:"Unconfirmed events an aggregate may have; above 1 an event the broker refuses can come after its successors."`
	OnDeadLetter     string        `name:"on-dead-letter" env:"ON_DEAD_LETTER" default:"continue" enum:"continue,hold" help:"What later events of a dead letter's aggregate do: continue, or hold until a person decides."`
	FallbackInterval time.Duration `name:"fallback-interval" env:"FALLBACK_INTERVAL" default:"5s" help:"How often to look for events that no notification announced."`
	BatchSize        int           `name:"batch-size" env:"BATCH_SIZE" default:"1000" help:"Events claimed at once at most."`
	BatchBytes       int64         `name:"batch-bytes" env:"BATCH_BYTES" default:"16777216" help:"Payload bytes claimed at once at most; one event is always claimed."`
	MaxAttempts      int           `name:"max-attempts" env:"MAX_ATTEMPTS" default:"10" help:"Failed attempts after which an event becomes a dead letter."`
	RetryBase        time.Duration `name:"retry-base" env:"RETRY_BASE" default:"1s" help:"Wait before the first retry; doubles with each."`
	RetryMax         time.Duration `name:"retry-max" env:"RETRY_MAX" default:"5m" help:"Longest wait between retries."`
	DeadAfter        time.Duration `name:"dead-after" env:"DEAD_AFTER" default:"1h" help:"Age below which an event that the broker nacks does not become a dead letter."`
	ConfirmTimeout   time.Duration `name:"confirm-timeout" env:"CONFIRM_TIMEOUT" default:"5s" help:"How long to wait for the broker's confirm."`
	ShutdownTimeout  time.Duration `name:"shutdown-timeout" env:"SHUTDOWN_TIMEOUT" default:"8s" help:"How long to finish what is in flight after SIGTERM."`

	HTTPAddr      string `name:"http-addr" env:"HTTP_ADDR" default:":9090" help:"Address of /metrics, /livez and /readyz."`
	WebConfigFile string `name:"web.config.file" env:"WEB_CONFIG_FILE" help:"TLS and authentication for HTTP, in the Prometheus exporter-toolkit's format."`
	LogLevel      string `name:"log-level" env:"LOG_LEVEL" default:"info" enum:"debug,info,warn,error" help:"Least level that is logged."`
	LogFormat     string `name:"log-format" env:"LOG_FORMAT" default:"json" enum:"json,text" help:"Form of the log lines."`
}
