package test

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"math/big"
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"outbox-relay/internal/testenv"
)

// authority is a private certificate authority whose files lie in dir.
type authority struct {
	dir  string
	cert *x509.Certificate
	key  *ecdsa.PrivateKey
}

func newAuthority(t *testing.T) *authority {
	t.Helper()
	// Readable by the servers' users, who are not the test's: a container's mount.
	a := &authority{dir: filepath.Join(t.TempDir(), "tls")}
	if err := os.Mkdir(a.dir, 0o755); err != nil {
		t.Fatal(err)
	}
	a.key = a.issue(t, "ca", &x509.Certificate{IsCA: true, BasicConstraintsValid: true, KeyUsage: x509.KeyUsageCertSign})
	return a
}

// issue makes name.pem and name.key. The first certificate is the authority's own.
func (a *authority) issue(t *testing.T, name string, c *x509.Certificate) *ecdsa.PrivateKey {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	c.SerialNumber = big.NewInt(time.Now().UnixNano())
	c.Subject = pkix.Name{CommonName: name}
	c.NotBefore, c.NotAfter = time.Now().Add(-time.Hour), time.Now().Add(time.Hour)
	parent, signer := a.cert, a.key
	if parent == nil {
		parent, signer = c, key
	}
	der, err := x509.CreateCertificate(rand.Reader, c, parent, &key.PublicKey, signer)
	if err != nil {
		t.Fatal(err)
	}
	if a.cert == nil {
		if a.cert, err = x509.ParseCertificate(der); err != nil {
			t.Fatal(err)
		}
	}
	keyDER, err := x509.MarshalPKCS8PrivateKey(key)
	if err != nil {
		t.Fatal(err)
	}
	a.write(t, name+".pem", string(pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der})))
	a.write(t, name+".key", string(pem.EncodeToMemory(&pem.Block{Type: "PRIVATE KEY", Bytes: keyDER})))
	return key
}

func (a *authority) write(t *testing.T, name, text string) {
	t.Helper()
	if err := os.WriteFile(a.path(name), []byte(text), 0o644); err != nil {
		t.Fatal(err)
	}
}

func (a *authority) path(name string) string { return filepath.Join(a.dir, name) }

// The broker wants a client's certificate and has one of a private authority.
func TestBrokerIsReachedByTLSWithAPrivateAuthority(t *testing.T) {
	t.Parallel()
	ca := newAuthority(t)
	ca.issue(t, "server", &x509.Certificate{
		DNSNames: []string{"broker.example"}, IPAddresses: []net.IP{net.IPv4(127, 0, 0, 1)},
		ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth},
	})
	ca.issue(t, "client", &x509.Certificate{ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageClientAuth}})
	ca.write(t, "rabbitmq.conf", `listeners.ssl.default = 5671
ssl_options.cacertfile = /tls/ca.pem
ssl_options.certfile = /tls/server.pem
ssl_options.keyfile = /tls/server.key
ssl_options.verify = verify_peer
ssl_options.fail_if_no_peer_cert = true
`)
	mq := testenv.OwnRabbitMQ(t, testenv.Options{
		Mounts: []string{ca.dir + ":/tls:ro", ca.path("rabbitmq.conf") + ":/etc/rabbitmq/conf.d/50-tls.conf:ro"},
		Ports:  []string{"5671/tcp"},
	})
	o := outboxOn(t, testenv.Database(t), mq.URL)
	q := testenv.Consume(t, mq.URL, exchange)
	url := "amqps://" + urlUser(t, mq.URL) + "@" + mq.Addr("5671/tcp") + "/"

	stranger := testenv.Start(t, "DATABASE_URL="+o.dsn, "AMQP_URL="+url)
	stranger.WaitLog(t, patience, "certificate signed by unknown authority")
	stranger.NotReady(t)
	if code := stranger.Stop(t); code != 0 {
		t.Errorf("exit code %d, want 0", code)
	}

	p := testenv.Start(t, "DATABASE_URL="+o.dsn, "AMQP_URL="+url+"?cacertfile="+ca.path("ca.pem")+
		"&certfile="+ca.path("client.pem")+"&keyfile="+ca.path("client.key"))
	p.Ready(t)
	o.insertMany(t, 100, 10, "order.created")
	waitCount(t, q, 100)
	if strings.Contains(p.Logs(), "PRIVATE KEY") {
		t.Error("the log holds a key")
	}
	if code := p.Stop(t); code != 0 {
		t.Errorf("exit code %d, want 0", code)
	}

	// Each address of a list is checked under its own name: the certificate does not have the first.
	files := "?cacertfile=" + ca.path("ca.pem") + "&certfile=" + ca.path("client.pem") + "&keyfile=" + ca.path("client.key")
	other := strings.Replace(url, "127.0.0.1", "localhost", 1)
	second := testenv.Start(t, "DATABASE_URL="+o.dsn, "AMQP_URL="+other+files+","+url+files)
	second.Ready(t)
	o.insertMany(t, 100, 10, "order.created")
	waitCount(t, q, 200)
	wantReason(t, "log", second.Logs(), "certificate is valid for")
}

// PostgreSQL takes TLS only, has a certificate of a private authority and wants a client's.
func TestDatabaseIsReachedByTLSWithAPrivateAuthority(t *testing.T) {
	t.Parallel()
	ca := newAuthority(t)
	ca.issue(t, "server", &x509.Certificate{
		IPAddresses: []net.IP{net.IPv4(127, 0, 0, 1)}, ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth},
	})
	ca.issue(t, "client", &x509.Certificate{ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageClientAuth}})
	if err := os.Chmod(ca.path("client.key"), 0o600); err != nil { // what lib/pq insists on
		t.Fatal(err)
	}
	pg := testenv.OwnPostgres(t, testenv.Options{Mounts: []string{ca.dir + ":/tls:ro"}})
	o := outboxOn(t, pg.DSN, testenv.Vhost(t))
	pg.Exec(t, "sh", "-c", `cd "$PGDATA" && cp /tls/ca.pem /tls/server.pem /tls/server.key . && chmod 600 server.key &&
		{ [ "$(id -u)" != 0 ] || chown postgres server.key; }
		printf 'local all all trust\nhostssl all all all scram-sha-256 clientcert=verify-ca\n' >pg_hba.conf`)
	for _, set := range []string{"ssl_ca_file = 'ca.pem'", "ssl_cert_file = 'server.pem'", "ssl_key_file = 'server.key'", "ssl = on"} {
		testenv.Exec(t, pg.DSN, "ALTER SYSTEM SET "+set)
	}
	testenv.Exec(t, pg.DSN, "SELECT pg_reload_conf()")
	q := testenv.Consume(t, o.amqpURL, exchange)

	plain := testenv.Start(t, "DATABASE_URL="+pg.DSN, "AMQP_URL="+o.amqpURL)
	plain.WaitLog(t, patience, "no pg_hba.conf entry")
	verified := strings.Replace(pg.DSN, "sslmode=disable", "sslmode=verify-full", 1)
	stranger := testenv.Start(t, "DATABASE_URL="+verified, "AMQP_URL="+o.amqpURL)
	stranger.WaitLog(t, patience, "certificate signed by unknown authority")
	stranger.NotReady(t)

	verified += "&sslrootcert=" + ca.path("ca.pem") + "&sslcert=" + ca.path("client.pem") + "&sslkey=" + ca.path("client.key")
	p := testenv.Start(t, "DATABASE_URL="+verified, "AMQP_URL="+o.amqpURL, "FALLBACK_INTERVAL=1h")
	p.Ready(t)
	if code, _, stderr := testenv.Command(t, []string{"DATABASE_URL=" + verified}, "migrate"); code != 0 {
		t.Errorf("migrate: exit code %d, %s", code, stderr)
	}
	for i := range 3 {
		testenv.Exec(t, verified, `INSERT INTO outbox_events (aggregate_type, aggregate_id, event_type, payload)
			VALUES ('order', '1', 'order.created', '{}')`)
		waitCount(t, q, i+1)
	}
}
