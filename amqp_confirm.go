package main

import (
	"errors"
	"fmt"
	"math"
	"slices"
	"strings"
	"time"

	amqp "github.com/rabbitmq/amqp091-go"
)

// flight is a message that was written and waits for its confirm.
type flight struct {
	event    *Event
	channel  *amqpChannel
	confirm  *amqp.DeferredConfirmation
	sent     time.Duration // on the session's clock
	returned string        // the broker's reason for returning it
}

// answered reports whether the broker has said what became of the message.
func (f *flight) answered() bool {
	select {
	case <-f.confirm.Done():
	default:
		return false
	}
	// Not acked on a closed channel says nothing of this message.
	return f.confirm.Acked() || !f.channel.IsClosed()
}

// nearlyInOrder is how many unconfirmed messages collect passes over before it leaves the rest to
// the next time.
const nearlyInOrder = 32

// collect reports the events whose confirms have come. These come nearly in the order of writing,
// and a look at all that is in flight for each of them would be dear: unless all is set, it
// ends where hardly any more is to be found.
func (p *AMQPPublisher) collect(s *amqpSession, all bool) {
	var done []*flight
	enough := nearlyInOrder
	if all {
		s.swept, enough = time.Now(), math.MaxInt
	}
	split := func(flights []*flight) []*flight {
		kept := flights[:0]
		for i, f := range flights {
			if len(kept) >= enough {
				kept = append(kept, flights[i:]...)
				break
			}
			if f.answered() {
				done = append(done, f)
			} else {
				kept = append(kept, f)
			}
		}
		clear(flights[len(kept):])
		return kept
	}
	p.late = split(p.late)
	late := len(done)
	p.flights = split(p.flights)
	// A return comes before its ack and is in the buffer by now.
	p.matchReturns(s, done)
	for i, f := range done {
		s.confirms++
		r := Result{Event: f.event, Outcome: Confirmed}
		switch {
		case !f.confirm.Acked():
			r.Outcome, r.Reason = Nacked, "the broker refused the message (basic.nack)"
		case f.returned != "":
			r.Outcome, r.Reason = Returned, f.returned
		}
		if i >= late {
			p.resolve(r)
		} else if r.Outcome == Confirmed { // its chain went on without it
			p.report(r)
		}
	}
	if len(done) > 0 {
		s.heard = s.clock.now()
		p.metrics.LastConfirm.SetToCurrentTime()
	}
}

// matchReturns notes the broker's reason beside each returned message. Only the message-id tells
// which it is: a return carries no delivery tag.
func (p *AMQPPublisher) matchReturns(s *amqpSession, done []*flight) {
	var byID map[string]*flight
	for _, ch := range []*amqpChannel{s.main, s.side} {
		if ch == nil {
			continue
		}
		for len(ch.returns) > 0 {
			if byID == nil {
				byID = make(map[string]*flight, len(done)+len(p.flights)+len(p.late))
				for _, f := range slices.Concat(p.late, p.flights, done) {
					byID[f.event.ID] = f
				}
			}
			r := <-ch.returns
			if f := byID[r.MessageId]; f != nil {
				f.returned = fmt.Sprintf("%d %s (exchange %q, routing key %q)", r.ReplyCode, r.ReplyText, r.Exchange, r.RoutingKey)
			}
		}
	}
}

// expire gives up on confirms that did not come in time. One is late if the broker has confirmed
// another message or answered a question in the second half of its time: its queue is to blame. Otherwise
// it is the link or the broker, and no fault of the event.
func (p *AMQPPublisher) expire(s *amqpSession) error {
	now, limit := s.clock.now(), p.cfg.ConfirmTimeout
	for len(p.flights) > 0 && now-p.flights[0].sent > limit/2 {
		f := p.flights[0]
		due, heard := now-f.sent > limit, s.heard >= f.sent+limit/2
		switch {
		case due && heard:
			p.flights = slices.Delete(p.flights, 0, 1)
			p.late = append(p.late, f)
			p.resolve(Result{Event: f.event, Outcome: Late, Reason: "no confirm within " + limit.String()})
		case due:
			return errBrokerMute
		case !heard && s.reply == nil:
			s.ask()
			return nil
		default:
			return nil
		}
	}
	// A queue that never confirms must not use up what may be in flight. The confirm of a message that
	// is forgotten here no longer counts, so its event is sent once more.
	if over := len(p.late) - s.maxInFlight/2; over > 0 {
		p.late = slices.Delete(p.late, 0, over)
	}
	return nil
}

// channelClosed finds the event that made the broker close ch, and opens it anew. The broker
// does not say which message it was: of several, each is then published alone until the guilty
// one is found. An error is returned when no single event is to blame, and means that the
// session is lost.
func (p *AMQPPublisher) channelClosed(s *amqpSession, ch *amqpChannel, closed *amqp.Error) error {
	if s.conn.IsClosed() || closed == nil {
		return connectionError(<-s.gone)
	}
	p.collect(s, true)
	if p.isOutage(closed) {
		return closed
	}
	var suspects []*Event
	p.flights = slices.DeleteFunc(p.flights, func(f *flight) bool {
		if f.channel != ch {
			return false
		}
		suspects = append(suspects, f.event)
		p.closings[f.event.ID]++
		return true
	})
	p.late = slices.DeleteFunc(p.late, func(f *flight) bool { return f.channel == ch })
	reopened, err := s.open()
	if err != nil {
		return err
	}
	if ch == s.side {
		s.side = reopened
	} else {
		s.main = reopened
	}
	switch len(suspects) {
	case 0:
		return closed
	case 1:
		p.resolve(Result{Event: suspects[0], Outcome: Rejected, Reason: fmt.Sprintf("%s: %d %s", reasonChannelClosed, closed.Code, closed.Reason)})
		p.rejoin()
	default:
		p.solo = append(suspects, p.solo...)
	}
	return nil
}

// reasonChannelClosed begins the reason of an event that closed a channel. sql/claim.sql looks for
// it, behind the name of the outcome, in last_error.
const reasonChannelClosed = "the broker closed the channel"

// rejoin lets the events that were only suspected by their neighbourhood go with all others again,
// once: where there is another guilty one, each time would send them once more.
func (p *AMQPPublisher) rejoin() {
	var ready []*Event
	p.solo = slices.DeleteFunc(p.solo, func(e *Event) bool {
		if e.Isolate || p.accused[e.ID] || p.closings[e.ID] > 1 {
			return false
		}
		ready = append(ready, e)
		return true
	})
	p.ready = append(ready, p.ready...)
}

// isOutage reports whether the broker's reason for closing a channel holds for all events alike.
func (p *AMQPPublisher) isOutage(e *amqp.Error) bool {
	switch e.Code {
	case amqp.NotFound:
		return p.mapper.exchange.static()
	case amqp.AccessRefused:
		onlyThisKey := strings.Contains(e.Reason, "access to topic") && !p.mapper.key.static()
		return p.mapper.exchange.static() && !onlyThisKey
	default:
		return false
	}
}

// blamesMessage reports whether the broker closed the connection for something we sent, not for
// reasons of its own: an AMQP hard error about what was on the wire. Errors of a channel are
// dealt with before the connection ends.
func blamesMessage(err error) bool {
	closed, ok := errors.AsType[*amqp.Error](err)
	if !ok || !closed.Server {
		return false
	}
	switch closed.Code {
	case amqp.FrameError, amqp.SyntaxError, amqp.CommandInvalid, amqp.ChannelError, amqp.UnexpectedFrame,
		amqp.ResourceError, amqp.NotImplemented:
		return true
	}
	return false
}

// connectionError is the reason the connection ended for; nil stands for an end without reason.
func connectionError(closed *amqp.Error) error {
	if closed == nil {
		return errBrokerClosed
	}
	return closed
}
