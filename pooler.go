package main

import (
	"cmp"
	"context"
	"database/sql"
	"database/sql/driver"
	"errors"
	"fmt"

	sqlfiles "outbox-relay/sql"
)

// errPooler: the connection does not reach one server session, so locks mean nothing. A
// restart does not help.
var errPooler = errors.New("DATABASE_URL leads through a transaction pooler: the relay's locks and LISTEN need a session of their own; name the server itself or a session-mode pool")

// refusePooler returns errPooler when conn, whose server process is pid, leads through a transaction
// pooler: outside of a transaction that lends our server session to whoever begins one.
func refusePooler(ctx context.Context, db *sql.DB, conn *sql.Conn, pid int) error {
	other, err := db.Conn(ctx)
	if err != nil {
		return fmt.Errorf("second connection: %w", err)
	}
	defer func() {
		_ = other.Raw(func(any) error { return driver.ErrBadConn }) // close it, don't pool it
	}()
	ourPID := func() (n int, err error) {
		err = conn.QueryRowContext(context.Background(), sqlfiles.Session("backend")).Scan(&n)
		return n, err
	}
	// A pooler lends the server session that was used last, or the one that was used first, or any. After
	// a query of ours another transaction gets our session then, or a next query another one. Beside other
	// clients of the pooler, our listener say, one try may miss.
	for queries := range 5 {
		for range queries + 1 {
			if n, err := ourPID(); err != nil || n != pid {
				return cmp.Or(err, errPooler)
			}
		}
		tx, err := other.BeginTx(ctx, nil)
		if err != nil {
			return err
		}
		var otherPID, during int
		err = tx.QueryRowContext(ctx, sqlfiles.Session("backend")).Scan(&otherPID)
		if err == nil && otherPID != pid {
			during, err = ourPID()
		}
		if err := errors.Join(err, tx.Rollback()); err != nil {
			return err
		}
		if during != pid {
			return errPooler
		}
	}
	return nil
}
