package test

import (
	"database/sql"
	"fmt"
	"net/url"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/lib/pq"

	"outbox-relay/internal/testenv"
)

// account is one name on both servers, with a password of its own.
type account struct {
	name string
	o    *outbox
}

// newAccount makes a role that may do all that the relay does, and the broker's user beside it.
func newAccount(t *testing.T, o *outbox, name, password string) *account {
	t.Helper()
	a := &account{name, o}
	role := pq.QuoteIdentifier(name)
	testenv.Exec(t, o.dsn, fmt.Sprintf(`CREATE ROLE %s LOGIN; GRANT ALL ON ALL TABLES IN SCHEMA public TO %s`, role, role))
	t.Cleanup(func() { testenv.Exec(t, o.dsn, fmt.Sprintf("DROP OWNED BY %s; DROP ROLE %s", role, role)) })
	a.setPassword(t, password)
	vhost := strings.TrimPrefix(parse(t, o.amqpURL).EscapedPath(), "/")
	testenv.API(t, "PUT", "/permissions/"+vhost+"/"+url.PathEscape(name), map[string]string{"configure": ".*", "write": ".*", "read": ".*"}, nil)
	t.Cleanup(func() { testenv.API(t, "DELETE", "/users/"+url.PathEscape(name), nil, nil) })
	return a
}

// setPassword changes both servers' passwords.
func (a *account) setPassword(t *testing.T, password string) {
	t.Helper()
	testenv.Exec(t, a.o.dsn, fmt.Sprintf("ALTER ROLE %s PASSWORD %s", pq.QuoteIdentifier(a.name), pq.QuoteLiteral(password)))
	testenv.API(t, "PUT", "/users/"+url.PathEscape(a.name), map[string]string{"password": password, "tags": ""}, nil)
}

// urls are those of both servers for the account.
func (a *account) urls(t *testing.T, password string) (database, amqp string) {
	t.Helper()
	d, m := parse(t, a.o.dsn), parse(t, a.o.amqpURL)
	d.User, m.User = url.UserPassword(a.name, password), url.UserPassword(a.name, password)
	return d.String(), m.String()
}

func parse(t *testing.T, raw string) *url.URL {
	t.Helper()
	u, err := url.Parse(raw)
	if err != nil {
		t.Fatal(err)
	}
	return u
}

// hostile is every character that has a meaning in a URL or a DSN.
const hostile = `p@s:s/w?r#d%41 '"\+&=[]{}|^~,;<>é`

func TestCredentialsWithSpecialCharacters(t *testing.T) {
	t.Parallel()
	o := newOutbox(t)
	q := testenv.Consume(t, o.amqpURL, exchange)
	a := newAccount(t, o, `re@l:a/y?#% `+o.name(), hostile)
	database, amqpURL := a.urls(t, hostile)
	keyValue := func(s string) string { return "'" + strings.NewReplacer(`\`, `\\`, `'`, `\'`).Replace(s) + "'" }
	d := parse(t, o.dsn)
	dsn := fmt.Sprintf("host=%s port=%s dbname=%s sslmode=disable user=%s password=%s",
		d.Hostname(), d.Port(), o.name(), keyValue(a.name), keyValue(hostile))
	for name, databaseURL := range map[string]string{"URL": database, "key=value": dsn} {
		p := testenv.Start(t, "DATABASE_URL="+databaseURL, "AMQP_URL="+amqpURL, "LOG_LEVEL=debug")
		p.Ready(t)
		id := o.insert(t, event{})[0]
		if got := q.Next(t, patience); got.MessageId != id {
			t.Errorf("%s: got %s, want %s", name, got.MessageId, id)
		}
		if code := p.Stop(t); code != 0 {
			t.Errorf("%s: exit code %d", name, code)
		}
		wantNoSecret(t, p.Logs(), hostile)
	}
}

// Passwords change under the running relay: it reads the files again when it must connect anew.
func TestPasswordsAreRotatedWithoutARestart(t *testing.T) {
	t.Parallel()
	o := newOutbox(t)
	q := testenv.Consume(t, o.amqpURL, exchange)
	const before, after = "first-hunter2", "second-hunter3"
	a := newAccount(t, o, "relay_"+o.name(), before)
	dir := t.TempDir()
	files := func(password string) {
		database, amqpURL := a.urls(t, password)
		for name, text := range map[string]string{"database": database, "amqp": amqpURL} {
			if err := os.WriteFile(filepath.Join(dir, name), []byte(text+"\n"), 0o600); err != nil {
				t.Fatal(err)
			}
		}
	}
	files(before)
	p := testenv.Start(t, "DATABASE_URL_FILE="+filepath.Join(dir, "database"), "AMQP_URL_FILE="+filepath.Join(dir, "amqp"))
	p.Ready(t)
	o.insert(t, event{})
	q.Next(t, patience)

	a.setPassword(t, after)
	a.disconnect(t)
	p.WaitLog(t, patience, "password authentication failed")
	p.WaitLog(t, patience, "username or password not allowed")
	reasons := p.NotReady(t)
	files(after)
	p.Ready(t)
	o.insert(t, event{})
	q.Next(t, patience)
	wantNoSecret(t, p.Logs()+reasons, before, after)
	o.wantUntouched(t)
}

// disconnect ends all connections of the account.
func (a *account) disconnect(t *testing.T) {
	t.Helper()
	testenv.Eventually(t, patience, "the account's sessions are ended", func() bool {
		testenv.Exec(t, a.o.dsn, "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE usename = $1", a.name)
		return testenv.Value[int](t, a.o.dsn, "SELECT count(*) FROM pg_stat_activity WHERE usename = $1", a.name) == 0
	})
	testenv.API(t, "DELETE", "/connections/username/"+url.PathEscape(a.name), nil, nil)
}

// name is that of the outbox's database, which no other test uses.
func (o *outbox) name() string {
	var name string
	if err := o.db.QueryRow("SELECT current_database()").Scan(&name); err != nil && err != sql.ErrNoRows {
		panic(err)
	}
	return name
}

func wantNoSecret(t *testing.T, text string, secrets ...string) {
	t.Helper()
	for _, s := range secrets {
		for _, form := range []string{s, url.QueryEscape(s), url.PathEscape(s), url.UserPassword("", s).String()[1:]} {
			if strings.Contains(text, form) {
				t.Errorf("the password %q is in\n%s", form, text)
			}
		}
	}
}
