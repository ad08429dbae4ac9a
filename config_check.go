package main

import (
	"fmt"
	"net"
	"reflect"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"time"

	"outbox-relay/internal/serverurl"

	"github.com/prometheus/exporter-toolkit/web"
)

// fault is one thing wrong with the configuration. Its text may quote the value, but never of a
// setting that holds a password.
type fault struct{ setting, text string }

// configError is all that is wrong with the configuration, in the order of the settings. A
// restart will not mend it.
type configError []fault

func (e configError) Error() string {
	var b strings.Builder
	fmt.Fprintf(&b, "configuration: %s", counted(len(e), "fault"))
	for _, f := range e {
		fmt.Fprintf(&b, "\n  %s: %s", f.setting, f.text)
	}
	return b.String()
}

// validate returns every fault of the configuration as a configError, those found while reading
// it included, before anything is opened but the files it names. lookup is the environment, for
// what libraries read for themselves. Faults are limited to the settings that the command uses.
func (c Config) validate(cmd command, read []fault, lookup func(string) (string, bool)) error {
	bad := make(map[string]bool) // not looked at again, what they hold is meaningless
	for _, f := range read {
		bad[f.setting] = true
	}
	faults := slices.Clone(read)
	for _, s := range c.settings() {
		if text := s.outOfBounds(); text != "" && !bad[s.name] {
			faults = append(faults, fault{s.name, text})
			bad[s.name] = true
		}
	}
	fine := func(names ...string) bool {
		return !slices.ContainsFunc(names, func(n string) bool { return bad[n] })
	}
	faults = slices.Concat(faults, c.conflicts(fine), c.databaseFaults(lookup), c.amqpFaults(), c.httpFaults())

	if c, ok := cmd.(checked); ok {
		for _, f := range c.faults() {
			if fine(f.setting) {
				faults = append(faults, f)
			}
		}
	}
	faults = slices.DeleteFunc(faults, func(f fault) bool {
		ofCommand := strings.HasPrefix(f.setting, "--") || strings.HasPrefix(f.setting, "<")
		return !ofCommand && !cmd.uses(f.setting)
	})
	if len(faults) == 0 {
		return nil
	}
	order := make(map[string]int)
	for i, s := range c.settings() {
		order[s.name] = i - len(c.settings()) // others come last
	}
	slices.SortStableFunc(faults, func(a, b fault) int { return order[a.setting] - order[b.setting] })
	return configError(faults)
}

// outOfBounds compares a value with the bounds in its tags.
func (s setting) outOfBounds() string {
	if allowed := s.tag.Get("enum"); allowed != "" {
		if list := strings.Split(allowed, ","); !slices.Contains(list, s.value.String()) {
			return fmt.Sprintf("%q is not one of %s", s.value.String(), strings.Join(list, ", "))
		}
	}
	least, most := s.tag.Get("min"), s.tag.Get("max")
	if least == "" {
		return ""
	}
	n := s.value.Int()
	if n < boundOf(s.value.Type(), least) || n > boundOf(s.value.Type(), most) {
		return fmt.Sprintf("%v is not from %s to %s", s.value.Interface(), least, most)
	}
	return ""
}

// boundOf reads a bound written in a tag; one that cannot be read is a slip in this program.
func boundOf(t reflect.Type, text string) int64 {
	v := reflect.New(t).Elem()
	set := setInt
	if t == reflect.TypeFor[time.Duration]() {
		set = setDuration
	}
	if wanted := set(v, text); wanted != "" {
		panic(fmt.Sprintf("bound %q is not %s", text, wanted))
	}
	return v.Int()
}

// exchangeType matches what RabbitMQ knows and what plugins add.
var exchangeType = regexp.MustCompile(`^(topic|direct|fanout|headers|x-[a-z0-9-]+)$`)

// conflicts finds settings that make no sense, alone or together. fine reports whether what the
// settings hold means anything.
func (c Config) conflicts(fine func(names ...string) bool) (faults []fault) {
	add := func(bad bool, setting, format string, args ...any) {
		if bad {
			faults = append(faults, fault{setting, fmt.Sprintf(format, args...)})
		}
	}
	add(!exchangeType.MatchString(c.AMQPExchangeType), "AMQP_EXCHANGE_TYPE",
		"%q is not topic, direct, fanout, headers or a plugin's type that begins with x-", c.AMQPExchangeType)
	for name, text := range map[string]string{"AMQP_EXCHANGE": c.AMQPExchange, "AMQP_ROUTING_KEY": c.AMQPRoutingKey} {
		if _, err := parseRoute(name, text); err != nil {
			add(true, name, "%s", strings.TrimPrefix(err.Error(), name+": "))
		}
	}
	add(fine("AGGREGATE_WINDOW") && c.Ordering == "none" && c.AggregateWindow > 1, "AGGREGATE_WINDOW",
		"%d has no meaning with ORDERING=none, which puts no limit on an aggregate: leave it at 1", c.AggregateWindow)
	add(c.Ordering == "none" && c.OnDeadLetter == "hold", "ON_DEAD_LETTER",
		"hold has no meaning with ORDERING=none, where no event waits for another")
	add(fine("RETRY_BASE", "RETRY_MAX") && c.RetryBase > c.RetryMax, "RETRY_BASE",
		"%v is over RETRY_MAX (%v)", c.RetryBase, c.RetryMax)
	add(fine("CONFIRM_TIMEOUT", "SHUTDOWN_TIMEOUT") && c.ConfirmTimeout >= c.ShutdownTimeout, "CONFIRM_TIMEOUT",
		"%v is not below SHUTDOWN_TIMEOUT (%v): a shutdown could not wait for a confirm, and the event would be sent twice",
		c.ConfirmTimeout, c.ShutdownTimeout)
	if _, err := c.keep(); err != nil {
		add(true, "RETENTION", "%v", err)
	}
	return faults
}

// oneOf checks a secret that may come from a variable or from a file. ok says that value holds it.
func oneOf(name, direct, file string) (value string, faults []fault, ok bool) {
	switch {
	case direct != "" && file != "":
		return "", []fault{{name + "_FILE", "set together with " + name + ": set one of the two"}}, false
	case direct == "" && file == "":
		return "", []fault{{name, "not set; set it, or " + name + "_FILE to a file that holds it"}}, false
	case direct != "":
		return direct, nil, true
	}
	value, err := secret("", file)
	if err != nil {
		return "", []fault{{name + "_FILE", err.Error()}}, false
	}
	return value, nil, true
}

// pgFaults names the variables that lib/pq finds in the environment by itself and refuses.
func pgFaults(lookup func(string) (string, bool)) (faults []fault) {
	for _, name := range serverurl.RefusedPGVariables {
		if _, ok := lookup(name); ok {
			faults = append(faults, fault{name, "not supported, every connect would fail: unset it"})
		}
	}
	return faults
}

func (c Config) databaseFaults(lookup func(string) (string, bool)) []fault {
	refused := pgFaults(lookup)
	dsn, faults, ok := oneOf("DATABASE_URL", c.DatabaseURL, c.DatabaseURLFile)
	if !ok {
		return append(faults, refused...)
	}
	_, texts := serverurl.PrepareDSN(dsn)
	for _, text := range texts {
		if len(refused) > 0 && strings.HasPrefix(text, "environment variable") {
			continue // the same again, from lib/pq
		}
		faults = append(faults, fault{"DATABASE_URL", text})
	}
	return append(faults, refused...)
}

func (c Config) amqpFaults() []fault {
	list, faults, ok := oneOf("AMQP_URL", c.AMQPURL, c.AMQPURLFile)
	if !ok {
		return faults
	}
	urls := serverurl.SplitAMQP(list)
	for i, u := range urls {
		which := ""
		if len(urls) > 1 {
			which = fmt.Sprintf("number %d of %d: ", i+1, len(urls))
		}
		for _, text := range slices.Concat(serverurl.CheckAMQP(u), serverurl.CheckTLSFiles(u)) {
			faults = append(faults, fault{"AMQP_URL", which + text})
		}
	}
	return faults
}

// quoted matches values that errors of YAML quote, hashes and keys among them.
var quoted = regexp.MustCompile("`[^`]*`")

func (c Config) httpFaults() (faults []fault) {
	_, port, err := net.SplitHostPort(c.HTTPAddr)
	if _, portErr := strconv.ParseUint(port, 10, 16); err != nil || portErr != nil {
		faults = append(faults, fault{"HTTP_ADDR", fmt.Sprintf("%q is not an address like :9090 or 127.0.0.1:9090", c.HTTPAddr)})
	}
	if err := web.Validate(c.WebConfigFile); err != nil {
		faults = append(faults, fault{"WEB_CONFIG_FILE", quoted.ReplaceAllString(oneLine(err.Error()), "`...`")})
	}
	return faults
}
