package main

import (
	"context"
	"errors"
	"fmt"
	"time"

	"outbox-relay/internal/serverurl"

	amqp "github.com/rabbitmq/amqp091-go"
)

// brokerWait is how long the broker may take to answer or to say that it is blocked.
const brokerWait = 5 * time.Second

// checkRabbitMQ checks every broker of AMQP_URL and the exchange on it. No message is published.
func (d *doctor) checkRabbitMQ(ctx context.Context) {
	urls, err := d.cfg.amqpURLs()
	if err != nil {
		d.fault("rabbitmq", "correct AMQP_URL", "%v", err)
		return
	}
	mapper, err := newMessageMapper(d.cfg)
	if err != nil {
		d.fault("rabbitmq", "correct AMQP_EXCHANGE and AMQP_ROUTING_KEY", "%v", err)
		return
	}
	exchange, static := mapper.staticExchange()
	reached := false
	for _, url := range urls {
		blocked := make(chan string, 1)
		s, err := dialAMQP(ctx, url, d.cfg, "", 1, func(b amqp.Blocking) {
			if b.Active {
				select {
				case blocked <- b.Reason:
				default:
				}
			}
		})
		if err != nil {
			d.add(brokerLevel(len(urls)), "rabbitmq", "start the broker, or correct AMQP_URL",
				fmt.Sprintf("connect to %s: %v", serverurl.RedactAMQP(url), err))
			continue
		}
		reached = true
		about := s.conn.Properties
		d.ok("rabbitmq", "%s: %v %v, cluster %v", serverurl.RedactAMQP(url), about["product"], about["version"], about["cluster_name"])
		if static {
			d.checkExchange(s, exchange, blocked)
		}
		s.close()
	}
	switch {
	case !reached && len(urls) > 1:
		d.fault("rabbitmq", "start the brokers, or correct AMQP_URL", "none of the %d brokers can be reached", len(urls))
	case !reached:
	case !static:
		d.unknown("exchange", "", "AMQP_EXCHANGE is a template: its exchanges are known only once there are events")
	default:
		d.checkBindings()
	}
}

// checkBindings judges by what became of events: bindings as such cannot be seen over AMQP.
func (d *doctor) checkBindings() {
	const mend = "rabbitmqctl list_bindings"
	switch {
	case !d.cfg.AMQPMandatory:
		d.unknown("bindings", mend, "with AMQP_MANDATORY=false nothing tells of an event that no queue is bound for")
	case d.returned == returnedNone:
		d.ok("bindings", "no pending or dead event was returned for want of a queue; the bindings as such cannot be seen over AMQP, `%s` shows them", mend)
	case d.returned == returnedSome:
		d.warning("bindings", mend, "events were returned, since no queue is bound for them: see the finding on failures")
	default:
		d.unknown("bindings", mend, "which queues are bound to the exchange cannot be seen over AMQP; events that no queue is bound for fail as returned")
	}
}

// brokerLevel is how bad it is that one of so many brokers cannot be reached.
func brokerLevel(brokers int) Level {
	if brokers > 1 {
		return LevelWarning
	}
	return LevelFault
}

// checkExchange checks that the exchange is there, as the relay wants it, and may be written to. The
// last is found out by a message in a transaction of the channel that is rolled back: the broker
// checks the right at once and routes nothing. It is also how a blocked broker shows itself, since it
// tells only connections that publish.
func (d *doctor) checkExchange(s *amqpSession, exchange string, blocked <-chan string) {
	declare := d.cfg.AMQPDeclare && exchange != "" && !isBuiltinExchange(exchange)
	if exchange != "" {
		err := onChannel(s, func(ch *amqp.Channel) error {
			return ch.ExchangeDeclarePassive(exchange, d.cfg.AMQPExchangeType, true, false, false, false, nil)
		})
		switch {
		case isAMQP(err, amqp.NotFound) && declare:
			d.warning("exchange", "start the relay", "%q is not there yet: the relay declares it", exchange)
			return
		case isAMQP(err, amqp.NotFound):
			d.fault("exchange", "declare it, or AMQP_DECLARE=true", "%q is not there, and the relay may not declare it", exchange)
			return
		case err != nil:
			d.fault("exchange", "see the message", "%q: %v", exchange, err)
			return
		}
	}
	if declare { // it is there, so this changes nothing
		err := onChannel(s, func(ch *amqp.Channel) error {
			return ch.ExchangeDeclare(exchange, d.cfg.AMQPExchangeType, true, false, false, false, nil)
		})
		switch {
		case isAMQP(err, amqp.PreconditionFailed):
			d.fault("exchange", "set AMQP_EXCHANGE_TYPE to its type, or AMQP_DECLARE=false",
				"%q is not durable or of another type: %v", exchange, err)
			return
		case isAMQP(err, amqp.AccessRefused):
			d.fault("exchange", "rabbitmqctl set_permissions, or AMQP_DECLARE=false", "%q: the user may not declare it: %v", exchange, err)
			return
		case err != nil:
			d.fault("exchange", "see the message", "%q: %v", exchange, err)
			return
		}
	}
	written := make(chan error, 1)
	go func() {
		written <- onChannel(s, func(ch *amqp.Channel) error {
			if err := ch.Tx(); err != nil {
				return err
			}
			if err := ch.Publish(exchange, "outbox-relay.doctor", false, false, amqp.Publishing{}); err != nil {
				return err
			}
			return ch.TxRollback()
		})
	}()
	select {
	case err := <-written:
		switch {
		case isAMQP(err, amqp.AccessRefused):
			d.fault("exchange", "rabbitmqctl set_permissions", "%q: the user may not write to it: %v", exchange, err)
		case err != nil:
			d.fault("exchange", "see the message", "%q: %v", exchange, err)
		default:
			d.ok("exchange", "%q is there and may be written to", exchange)
		}
	case reason := <-blocked:
		d.fault("exchange", "rabbitmq-diagnostics alarms", "the broker is blocked: %s", reason)
	case <-time.After(brokerWait):
		d.fault("exchange", "rabbitmq-diagnostics alarms", "the broker has not answered within %v", brokerWait)
	}
}

// onChannel opens a channel for one thing: the broker closes it with an error.
func onChannel(s *amqpSession, f func(*amqp.Channel) error) error {
	ch, err := s.conn.Channel()
	if err != nil {
		return err
	}
	err = f(ch)
	_ = ch.Close() // closed already after an error
	return err
}

// isAMQP reports whether err is the broker's with this code.
func isAMQP(err error, code int) bool {
	var e *amqp.Error
	return errors.As(err, &e) && e.Code == code
}
