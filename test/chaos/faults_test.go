package chaos

import "time"

// target is what a fault breaks. Two faults at once break different things.
type target int

const (
	thePostgres target = iota // the server, or the relays' links to it
	theRabbitMQ
	aRelay
)

// fault is one way to break something.
type fault struct {
	name string
	hits target
	// copies is how often what a relay has in hand may be sent twice because of it.
	copies int
	short  bool // belongs to the short run
	// fromBegin: recovery is measured from the fault's begin, since another relay takes over.
	fromBegin bool
	// begin breaks it, and returns how to mend it again, nil if it is over. alone tells that nothing
	// else is broken at the same time.
	begin func(c *chaos, alone bool) (end func())
}

var faults = []fault{
	{name: "PostgreSQL link cut", hits: thePostgres, copies: 4, short: true, begin: cut(postgresLink)},
	{name: "PostgreSQL link cut within an answer", hits: thePostgres, copies: 4, begin: cutWithin(postgresLink)},
	{name: "PostgreSQL link refused", hits: thePostgres, copies: 1, begin: refuse(postgresLink)},
	{name: "PostgreSQL link stalled", hits: thePostgres, copies: 2, begin: stall(postgresLink)},
	{name: "PostgreSQL link stalled within an answer", hits: thePostgres, copies: 2, begin: stallWithin(postgresLink)},
	{name: "PostgreSQL link slow", hits: thePostgres, copies: 1, begin: slow(postgresLink)},
	{name: "PostgreSQL restarted", hits: thePostgres, copies: 1, short: true, begin: restart(postgresServer)},
	{name: "PostgreSQL killed", hits: thePostgres, copies: 3, begin: kill(postgresServer)}, // what was marked in its last moments is pending again
	{name: "PostgreSQL paused", hits: thePostgres, copies: 2, begin: pause(postgresServer)},
	{name: "PostgreSQL read-only", hits: thePostgres, copies: 1, begin: readOnly},
	{name: "working session terminated", hits: thePostgres, copies: 4, begin: terminate(workingSession)},
	{name: "listening session terminated", hits: thePostgres, begin: terminate(listeningSession)},
	{name: "all sessions terminated", hits: thePostgres, copies: 4, short: true, begin: terminate(allSessions)},
	{name: "working session's server frozen", hits: thePostgres, copies: 2, begin: freezeBackend(workingSession, longest)},
	{name: "listening session's server frozen", hits: thePostgres, begin: freezeListener},
	{name: "flood of notifications", hits: thePostgres, short: true, begin: flood},
	{name: "rows locked by others", hits: thePostgres, begin: lockRows},
	{name: "table locked by others", hits: thePostgres, copies: 1, begin: lockTable},

	{name: "RabbitMQ link cut", hits: theRabbitMQ, copies: 4, short: true, begin: cut(rabbitmqLink)},
	{name: "RabbitMQ link cut within an answer", hits: theRabbitMQ, copies: 4, begin: cutWithin(rabbitmqLink)},
	{name: "RabbitMQ link refused", hits: theRabbitMQ, copies: 1, begin: refuse(rabbitmqLink)},
	{name: "RabbitMQ link stalled", hits: theRabbitMQ, copies: 2, short: true, begin: stall(rabbitmqLink)},
	{name: "RabbitMQ link stalled within an answer", hits: theRabbitMQ, copies: 2, begin: stallWithin(rabbitmqLink)},
	{name: "RabbitMQ link slow", hits: theRabbitMQ, copies: 1, begin: slow(rabbitmqLink)},
	{name: "RabbitMQ restarted", hits: theRabbitMQ, copies: 2, begin: restart(rabbitmqServer)},
	{name: "RabbitMQ killed", hits: theRabbitMQ, copies: 2, begin: kill(rabbitmqServer)},
	{name: "RabbitMQ paused", hits: theRabbitMQ, copies: 2, begin: pause(rabbitmqServer)},
	{name: "RabbitMQ closes all connections", hits: theRabbitMQ, copies: 1, short: true, begin: closeConnections},
	{name: "RabbitMQ memory alarm", hits: theRabbitMQ, copies: 1, short: true, begin: memoryAlarm},

	{name: "relay killed", hits: aRelay, copies: 1, short: true, fromBegin: true, begin: killRelay},
	{name: "both relays killed", hits: aRelay, copies: 2, begin: killBoth},
	{name: "relay terminated", hits: aRelay, short: true, fromBegin: true, begin: terminateRelay},
	{name: "standby terminated", hits: aRelay, fromBegin: true, begin: terminateStandby},
	{name: "relay frozen", hits: aRelay, copies: 1, fromBegin: true, begin: freeze},
}

// longest is how long a fault lasts at most: longer than every limit of the relay's, so that
// each of them is met.
const longest = 20 * time.Second

// lasting waits some random time and returns how to mend.
func (c *chaos) lasting(longest time.Duration, mend func()) (end func()) {
	d := c.between(time.Second, longest)
	return func() {
		time.Sleep(d)
		mend()
	}
}
