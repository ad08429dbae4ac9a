// Package sqlfiles holds the relay's SQL: plain files for people and psql, embedded for the binary.
package sqlfiles

import (
	_ "embed"
	"strings"
)

// Schema is schema.sql, idempotent; Exec it whole for a new outbox.
//
//go:embed schema.sql
var Schema string

//go:embed migrate.sql
var migrate string

// Channel is what the trigger notifies on. The payload is the oid of the outbox's table.
const Channel = "outbox_event"

// Classes of advisory locks: the first key of the two-key form. The second is the oid of
// outbox_events (of its schema for MigrateLockClass), see LockKey. schema.sql repeats
// DoorbellLockClass; a test compares them.
const (
	DoorbellLockClass  int32 = 0x6f62656c // 1868719468, 'obel': exclusive while the relay sleeps, shared by silent writers
	WorkLockClass      int32 = 0x6f77726b // 1870099051, 'owrk': held by whoever works the outbox
	KeeperLockClass    int32 = 0x6f6b7072 // 1869312114, 'okpr': held by the one relay that keeps the doorbell
	RetentionLockClass int32 = 0x6f72746e // 1869771886, 'ortn': held by the one relay that deletes old events
	MigrateLockClass   int32 = 0x6f6d6967 // 1869441383, 'omig': one migrate a schema at a time
)

// Classes of flags: locks that relays hold shared to show a condition, and that nobody waits for.
const (
	RelayFlagClass  int32 = 0x6f726c79 // 1869769849, 'orly': this session is a relay's
	PausedFlagClass int32 = 0x6f706175 // 1869635957, 'opau': it obeys the pause
	ListenFlagClass int32 = 0x6f6c7374 // 1869378420, 'olst': notifications reach it
	BrokerFlagClass int32 = 0x6f62726b // 1868722795, 'obrk': the broker takes its messages
)

// LockKey is the second key of a lock on the object with this oid. It keeps the bits, as
// PostgreSQL's cast of oid to integer does, so oids over 2^31 become negative. pg_locks shows both
// keys as oids again.
func LockKey(oid uint32) int32 { return int32(oid) }

// section returns the part of an SQL text between the line "-- section: name" and the next
// such line or the end. It panics when there is none: the texts are embedded.
func section(text, name string) string {
	const mark = "-- section: "
	_, rest, ok := strings.Cut(text, mark+name+"\n")
	if !ok {
		panic("no section " + name + " in the embedded SQL")
	}
	rest, _, _ = strings.Cut(rest, mark)
	return strings.TrimSpace(rest)
}

// SchemaSection returns one part of schema.sql by the name in its "-- section:" line.
func SchemaSection(name string) string { return section(Schema, name) }

// MigrateSection returns one part of migrate.sql by the name in its "-- section:" line.
func MigrateSection(name string) string { return section(migrate, name) }

// Index is one of the indexes of outbox_events besides its primary key.
type Index struct {
	Name   string
	Create string // CREATE INDEX name ON ..., without the final semicolon
}

// Indexes returns the indexes in the order of schema.sql.
func Indexes() []Index {
	var all []Index
	for _, statement := range strings.Split(SchemaSection("indexes"), ";") {
		const create = "CREATE INDEX IF NOT EXISTS "
		if _, rest, ok := strings.Cut(statement, create); ok {
			name, _, _ := strings.Cut(rest, " ")
			all = append(all, Index{Name: name, Create: "CREATE INDEX " + rest})
		}
	}
	return all
}

// TriggerFunction returns the body of outbox_notify() as PostgreSQL stores it.
func TriggerFunction() string {
	return strings.Split(SchemaSection("doorbell"), "$outbox$")[1]
}
