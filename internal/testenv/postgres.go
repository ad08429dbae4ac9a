package testenv

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"net/url"
	"os"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/lib/pq"
	"github.com/ory/dockertest/v3/docker"
)

const (
	postgresPort     = "5432/tcp"
	postgresUser     = "postgres"
	postgresPassword = "postgres"
)

// Postgres is a PostgreSQL of a test's own.
type Postgres struct {
	*Container
	DSN string // URL of an empty database, as superuser; stays valid over Stop and Start
}

// PoolerPort is the port of [Postgres.Pooler].
const PoolerPort = "6432/tcp"

// OwnPostgres starts a PostgreSQL that the test may stop, kill, freeze or starve. It is removed at
// the test's end.
func OwnPostgres(t testing.TB, o Options) *Postgres {
	t.Helper()
	needDocker(t, "TEST_DATABASE_URL")
	c := own(t, postgresSpec(imageOf(t, "POSTGRES_IMAGE")), o)
	return &Postgres{Container: c, DSN: postgresURL(c)}
}

// Standby starts a hot standby of p, to which every commit on p is replicated from now on before it
// is answered. [Postgres.Promote] makes it a primary.
func (p *Postgres) Standby(t testing.TB) *Postgres {
	t.Helper()
	p.Exec(t, "sh", "-c", `echo "host replication all all scram-sha-256" >>"$PGDATA/pg_hba.conf"`)
	Exec(t, p.DSN, "SELECT pg_reload_conf()")
	s := postgresSpec(imageOf(t, "POSTGRES_IMAGE"))
	s.user = "postgres"
	s.args = []string{"sh", "-c", fmt.Sprintf(`test -s "$PGDATA/PG_VERSION" || pg_basebackup -R -X stream -c fast -D "$PGDATA" \
		-d 'host=%s user=%s password=%s application_name=standby' && exec %s`, p.IP(), postgresUser, postgresPassword, strings.Join(s.args, " "))}
	c := own(t, s, Options{})
	Exec(t, p.DSN, "ALTER SYSTEM SET synchronous_standby_names = '*'")
	Exec(t, p.DSN, "SELECT pg_reload_conf()")
	Eventually(t, startTimeout, "the standby is synchronous", func() bool {
		return len(Query[string](t, p.DSN, "SELECT sync_state FROM pg_stat_replication WHERE sync_state = 'sync'")) == 1
	})
	return &Postgres{Container: c, DSN: postgresURL(c)}
}

// Promote makes a standby the primary.
func (p *Postgres) Promote(t testing.TB) {
	t.Helper()
	if !Value[bool](t, p.DSN, "SELECT pg_promote(true, 60)") {
		t.Fatal("the standby was not promoted")
	}
}

// Pooler starts a PgBouncer in front of p, in pool_mode transaction or session, and
// returns p's URL through it. p must publish [PoolerPort].
func (p *Postgres) Pooler(t testing.TB, mode string) string {
	t.Helper()
	p.Exec(t, "sh", "-c", `set -e
		command -v pgbouncer >/dev/null || { apt-get update -q && apt-get install -yq pgbouncer; } # an official image
		printf '[databases]\n* = host=127.0.0.1 port=5432 user=`+postgresUser+` password=`+postgresPassword+`\n[pgbouncer]\nlisten_addr = 0.0.0.0\nauth_type = any\npool_mode = `+mode+`\nunix_socket_dir =\npidfile = /tmp/pgbouncer.pid\n' >/tmp/pgbouncer.ini
		if [ "$(id -u)" = 0 ]; then as='-u postgres'; fi
		pgbouncer -d $as /tmp/pgbouncer.ini`)
	u, err := url.Parse(p.DSN)
	if err != nil {
		t.Fatal(err)
	}
	u.Host = p.Addr(PoolerPort)
	Eventually(t, startTimeout, "the pooler answers", func() bool {
		return withDB(u.String(), func(db *sql.DB) error { return db.Ping() }) == nil
	})
	return u.String()
}

func postgresSpec(image string) spec {
	return spec{
		kind:  "postgres",
		image: image,
		ports: []string{postgresPort},
		env: []string{
			"POSTGRES_USER=" + postgresUser, "POSTGRES_PASSWORD=" + postgresPassword, "POSTGRES_INITDB_ARGS=--no-sync",
		},
		// The data live as long as the container, so nothing needs to reach a disk.
		args: []string{
			"postgres", "-c", "fsync=off", "-c", "full_page_writes=off",
			"-c", "max_connections=200", "-c", "max_prepared_transactions=20",
		},
		stop: docker.SIGINT, // fast shutdown, what `docker stop` sends to this image
		ready: func(ctx context.Context, c *Container) error {
			return withDB(postgresURL(c), func(db *sql.DB) error { return db.PingContext(ctx) })
		},
	}
}

func postgresURL(c *Container) string {
	u := url.URL{
		Scheme: "postgres", User: url.UserPassword(postgresUser, postgresPassword),
		Host: c.Addr(postgresPort), Path: "/" + postgresUser, RawQuery: "sslmode=disable",
	}
	return u.String()
}

// sharedPostgres returns the URL of the server that all tests share, as a user that may create databases.
var sharedPostgres = sync.OnceValues(func() (string, error) {
	ctx := context.Background()
	if dsn := os.Getenv("TEST_DATABASE_URL"); dsn != "" {
		ctx, cancel := context.WithTimeout(ctx, 10*time.Second)
		defer cancel()
		if !isPostgresURL(dsn) {
			return "", errors.New("TEST_DATABASE_URL: want a postgres:// URL")
		}
		err := retry(ctx, func(ctx context.Context) error {
			return withDB(dsn, func(db *sql.DB) error { return db.PingContext(ctx) })
		})
		if err != nil {
			return "", fmt.Errorf("TEST_DATABASE_URL: %w", err)
		}
		return dsn, nil
	}
	if _, err := engine(); err != nil {
		return "", fmt.Errorf("no PostgreSQL to test with: set TEST_DATABASE_URL to one that runs, or make Docker available (%w)", err)
	}
	refs, err := serverImages()
	if err != nil {
		return "", err
	}
	c, err := runContainer(ctx, postgresSpec(refs["POSTGRES_IMAGE"]))
	if err != nil {
		return "", err
	}
	return postgresURL(c), nil
})

// Database makes an empty database for the test and returns its DSN, a URL without TLS. It is dropped,
// with the sessions still in it, at the test's end.
func Database(t testing.TB) string {
	t.Helper()
	Short(t)
	server, err := sharedPostgres()
	if err != nil {
		t.Fatal(err)
	}
	name := pq.QuoteIdentifier(uniqueName(t))
	Exec(t, server, "CREATE DATABASE "+name)
	t.Cleanup(func() { Exec(t, server, "DROP DATABASE "+name+" WITH (FORCE)") })

	u, err := url.Parse(server)
	if err != nil {
		t.Fatal(err)
	}
	u.Path = "/" + name[1:len(name)-1]
	return u.String()
}

// Exec runs a statement, or several when there are no arguments, in a session of its own, and returns
// the number of rows it changed.
func Exec(t testing.TB, dsn, query string, args ...any) int64 {
	t.Helper()
	var changed int64
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	err := withDB(dsn, func(db *sql.DB) error {
		res, err := db.ExecContext(ctx, query, args...)
		if err != nil {
			return err
		}
		changed, err = res.RowsAffected()
		return err
	})
	if err != nil {
		t.Fatalf("%.200s: %v", query, err)
	}
	return changed
}

// Query returns the first column of every row, in a session of its own.
func Query[T any](t testing.TB, dsn, query string, args ...any) []T {
	t.Helper()
	var all []T
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	err := withDB(dsn, func(db *sql.DB) (err error) {
		rows, err := db.QueryContext(ctx, query, args...)
		if err != nil {
			return err
		}
		defer func() { _ = rows.Close() }()
		for rows.Next() {
			var v T
			if err := rows.Scan(&v); err != nil {
				return err
			}
			all = append(all, v)
		}
		return rows.Err()
	})
	if err != nil {
		t.Fatalf("%.200s: %v", query, err)
	}
	return all
}

// Value returns the one column of the one row.
func Value[T any](t testing.TB, dsn, query string, args ...any) T {
	t.Helper()
	all := Query[T](t, dsn, query, args...)
	if len(all) != 1 {
		t.Fatalf("%.200s: %d rows, want 1", query, len(all))
	}
	return all[0]
}

// DB opens a pool that is closed at the test's end.
func DB(t testing.TB, dsn string) *sql.DB {
	t.Helper()
	db, err := sql.Open("postgres", dsn)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := db.Close(); err != nil {
			t.Errorf("close the database pool: %v", err)
		}
	})
	return db
}

// withDB opens a pool for one call of f.
func withDB(dsn string, f func(*sql.DB) error) error {
	// A context does not end pq's startup with a server that is frozen; its own limit, in seconds, does.
	u, err := url.Parse(dsn)
	if err != nil {
		return errors.New("not a URL")
	}
	if q := u.Query(); !q.Has("connect_timeout") {
		q.Set("connect_timeout", "10")
		u.RawQuery = q.Encode()
	}
	db, err := sql.Open("postgres", u.String())
	if err != nil {
		return err
	}
	defer func() { _ = db.Close() }()
	return f(db)
}

func isPostgresURL(dsn string) bool {
	u, err := url.Parse(dsn)
	return err == nil && (u.Scheme == "postgres" || u.Scheme == "postgresql")
}

// report prints an error of the clean-up that no test can carry any more.
func report(err error) {
	if err != nil {
		fmt.Fprintln(os.Stderr, "testenv:", err)
	}
}
