package testenv

import (
	"database/sql"
	"fmt"
	"net/url"
	"os"
	"sync/atomic"
	"testing"
	"time"
)

// OpenDatabase is Database with a pool of connections to it.
func OpenDatabase(t testing.TB) (dsn string, db *sql.DB) {
	t.Helper()
	dsn = Database(t)
	return dsn, DB(t, dsn)
}

// Querier is a database, a connection or a transaction.
type Querier interface {
	QueryRow(query string, args ...any) *sql.Row
	Exec(query string, args ...any) (sql.Result, error)
}

// QueryInt returns the one number that a query asks for.
func QueryInt(t testing.TB, q Querier, query string, args ...any) int {
	t.Helper()
	var n int
	if err := q.QueryRow(query, args...).Scan(&n); err != nil {
		t.Fatalf("%s: %v", query, err)
	}
	return n
}

// MustExec runs a statement, which must succeed.
func MustExec(t testing.TB, q Querier, query string, args ...any) {
	t.Helper()
	if _, err := q.Exec(query, args...); err != nil {
		t.Fatalf("%s: %v", query, err)
	}
}

// Begin opens a transaction in which the statement has run; it ends with the test at the latest.
func Begin(t testing.TB, db *sql.DB, statement string) *sql.Tx {
	t.Helper()
	tx, err := db.Begin()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = tx.Rollback() })
	MustExec(t, tx, statement)
	return tx
}

// InsertEventSQL is what an application says.
const InsertEventSQL = "INSERT INTO outbox_events (aggregate_type, aggregate_id, event_type, payload) VALUES ('order', '1', 'order.created', '{}')"

// InsertEvent inserts one event.
func InsertEvent(t testing.TB, q Querier) {
	t.Helper()
	MustExec(t, q, InsertEventSQL)
}

// roleCount tells the roles of a process apart.
var roleCount atomic.Int64

// Role makes a role that may log in and has no rights, and takes it away after the test.
func Role(t testing.TB, db *sql.DB) string {
	t.Helper()
	name := fmt.Sprintf("outbox_test_%d_%d", os.Getpid(), roleCount.Add(1))
	MustExec(t, db, fmt.Sprintf("CREATE ROLE %s LOGIN PASSWORD 'test'", name))
	t.Cleanup(func() { MustExec(t, db, fmt.Sprintf("DROP OWNED BY %s CASCADE; DROP ROLE %[1]s", name)) })
	return name
}

// AsRole returns a DSN with a role of [Role] in place of its user.
func AsRole(t testing.TB, dsn, role string) string {
	t.Helper()
	u := parseURL(t, dsn)
	u.User = url.UserPassword(role, "test")
	return u.String()
}

// WithParameter returns a DSN with one more parameter.
func WithParameter(t testing.TB, dsn, name, value string) string {
	t.Helper()
	u := parseURL(t, dsn)
	q := u.Query()
	q.Set(name, value)
	u.RawQuery = q.Encode()
	return u.String()
}

func parseURL(t testing.TB, dsn string) *url.URL {
	t.Helper()
	u, err := url.Parse(dsn)
	if err != nil {
		t.Fatal(err)
	}
	return u
}

// Until waits until cond holds, and fails the test if that takes longer than only a hang would.
func Until(t testing.TB, cond func() bool) {
	t.Helper()
	for end := time.Now().Add(20 * time.Second); !cond(); time.Sleep(5 * time.Millisecond) {
		if time.Now().After(end) {
			t.Fatal("waited for 20s in vain")
		}
	}
}
