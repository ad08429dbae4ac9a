package sqlfiles

import (
	_ "embed"
	"strings"
	"text/template"
)

var (
	//go:embed claim.sql
	claim string
	//go:embed claim_few.sql
	claimFew string
	//go:embed settle.sql
	settle string
	//go:embed session.sql
	session string
	//go:embed retention.sql
	retention string
	//go:embed operator.sql
	operator string
	//go:embed status.sql
	status string
	//go:embed doctor.sql
	doctor string
	//go:embed replay.sql
	replay string
	//go:embed dead_letters.sql
	deadLetters string
	// Backlog counts what is pending and dead, for gauges.
	//
	//go:embed backlog.sql
	Backlog string
)

// Claim is claim.sql for an ordered or unordered outbox whose payload column has this type, as
// PostgreSQL spells it. Blind, it leaves payload and headers out. Prepare it: it has parameters.
func Claim(ordered, blind bool, payloadType string) string {
	payload := payloadAs(payloadType)
	if payloadType != "bytea" {
		payloadType = "text"
	}
	return fill(claim, struct {
		Ordered, Blind       bool
		Payload, PayloadType string
	}{ordered, blind, payload, payloadType})
}

// ClaimFew is claim_few.sql, for an ordered outbox whose payload column has this type. Prepare it: it has
// parameters.
func ClaimFew(payloadType string) string {
	return fill(claimFew, struct{ Payload string }{payloadAs(payloadType)})
}

// payloadAs is the payload in the form in which its bytes go out.
func payloadAs(payloadType string) string {
	if payloadType == "bytea" {
		return "payload"
	}
	return "payload::text"
}

// Settle is settle.sql. With remove it deletes confirmed events instead of marking them. With
// skipLocked it passes over rows that another session has locked; without it is faster, and
// fails with lock_not_available.
func Settle(remove, skipLocked bool) string {
	return fill(settle, struct{ Remove, SkipLocked bool }{remove, skipLocked})
}

// Session is one statement of session.sql by the name in its "-- section:" line.
func Session(name string) string { return section(session, name) }

// Retention is one statement of retention.sql by the name in its "-- section:" line.
func Retention(name string) string { return section(retention, name) }

// Operator is one statement of operator.sql by the name in its "-- section:" line.
func Operator(name string) string { return section(operator, name) }

// Status is one statement of status.sql by the name in its "-- section:" line.
func Status(name string) string {
	return fill(section(status, name), struct{ Work, Doorbell, Relay, Paused, Listen, Broker int32 }{
		WorkLockClass, DoorbellLockClass, RelayFlagClass, PausedFlagClass, ListenFlagClass, BrokerFlagClass,
	})
}

// Doctor is one statement of doctor.sql by the name in its "-- section:" line.
func Doctor(name string) string { return section(doctor, name) }

// DeadLetters is one statement of dead_letters.sql by the name in its "-- section:" line.
func DeadLetters(name string) string { return matching(deadLetters, name) }

// Replay is one statement of replay.sql by the name in its "-- section:" line, for a payload column of
// this type.
func Replay(name, payloadType string) string {
	return fill(section(replay, name), struct{ Payload string }{payloadAs(payloadType)})
}

// matching is a statement of a text whose section "matching" says which rows are meant.
func matching(text, name string) string {
	return fill(section(text, name), struct{ Matching string }{section(text, "matching")})
}

// RetentionTry is the statement of retention.sql that tries the lock on a table.
func RetentionTry(table uint32) string {
	return fill(Retention("try"), struct{ Class, Key int32 }{RetentionLockClass, LockKey(table)})
}

// SessionLock is a statement of session.sql about the advisory lock of a class on a table.
func SessionLock(name string, class int32, table uint32) string {
	return fill(Session(name), struct{ Class, Key int32 }{class, LockKey(table)})
}

// fill executes an embedded template. It panics on a mistake in it: the texts are part of the program.
func fill(text string, data any) string {
	var b strings.Builder
	if err := template.Must(template.New("sql").Parse(text)).Execute(&b, data); err != nil {
		panic(err)
	}
	return b.String()
}
