package main

import "time"

const (
	// stopGrace is what Docker gives a container to stop; Kubernetes gives 30 s.
	stopGrace = 10 * time.Second
	// shortPatience is a time to the dead letter within which nobody mends a missing queue.
	shortPatience = time.Minute
)

// checkSettings points out settings that are allowed and yet rarely meant. What is plainly wrong has
// been refused before any command runs.
func (d *doctor) checkSettings(environ []string) {
	c := d.cfg
	before := len(d.findings)
	for _, hint := range unknownVariables(environ) {
		d.warning("settings", "correct the name, or remove it", "%s", hint)
	}
	if drain := max(c.ShutdownTimeout-settleReserve, c.ShutdownTimeout/2); c.ConfirmTimeout > drain {
		d.warning("settings", "raise SHUTDOWN_TIMEOUT or lower CONFIRM_TIMEOUT",
			"of SHUTDOWN_TIMEOUT (%v) there are %v to wait for confirms, less than CONFIRM_TIMEOUT (%v): a slow confirm at shutdown means a copy",
			c.ShutdownTimeout, drain, c.ConfirmTimeout)
	}
	if c.ShutdownTimeout >= stopGrace {
		d.warning("settings", "grant the container more, or lower SHUTDOWN_TIMEOUT",
			"SHUTDOWN_TIMEOUT (%v) is not below the %v that Docker grants by default: the relay may be killed before it has settled",
			c.ShutdownTimeout, stopGrace)
	}
	if !c.AMQPMandatory {
		d.warning("settings", "AMQP_MANDATORY=true",
			"with AMQP_MANDATORY=false an event that no queue is bound for is lost in silence")
	}
	if patience := c.untilDead(); patience < shortPatience {
		d.warning("settings", "raise MAX_ATTEMPTS or RETRY_BASE",
			"an event that is returned or rejected becomes a dead letter after about %v", patience.Round(time.Second))
	}
	if len(d.findings) == before {
		d.ok("settings", "an event that is returned or rejected becomes a dead letter after about %v", c.untilDead().Round(time.Second))
	}
}

// untilDead is how long the attempts of an event take that fails each time at once. What is taken off each
// wait by chance makes it up to a fifth less.
func (c Config) untilDead() (d time.Duration) {
	const long = 1000 * time.Hour // more is no different
	for n := 1; n < c.MaxAttempts && d < long; n++ {
		d += retryDelay(c.RetryBase, c.RetryMax, n)
	}
	return min(d, long)
}
