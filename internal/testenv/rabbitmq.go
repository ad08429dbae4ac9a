package testenv

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/url"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/ory/dockertest/v3/docker"
	amqp "github.com/rabbitmq/amqp091-go"
)

const (
	amqpPort         = "5672/tcp"
	managementPort   = "15672/tcp"
	rabbitmqUser     = "relay"
	rabbitmqPassword = "relay"
)

// RabbitMQ is a RabbitMQ of a test's own.
type RabbitMQ struct {
	*Container
	URL string // of vhost "/", as administrator; stays valid over Stop and Start
}

// OwnRabbitMQ starts a RabbitMQ that the test may stop, kill, freeze or starve. It is removed at the
// test's end.
func OwnRabbitMQ(t testing.TB, o Options) *RabbitMQ {
	t.Helper()
	needDocker(t, "TEST_AMQP_URL")
	c := own(t, rabbitmqSpec(imageOf(t, "RABBITMQ_IMAGE")), o)
	return &RabbitMQ{Container: c, URL: rabbitmqURL(c)}
}

// Ctl runs rabbitmqctl and returns what it prints. The Erlang runtime takes about a second to start.
func (r *RabbitMQ) Ctl(t testing.TB, args ...string) string {
	t.Helper()
	return r.Exec(t, append([]string{"rabbitmqctl", "-q"}, args...)...)
}

// API calls the management API; see the function of the same name.
func (r *RabbitMQ) API(t testing.TB, method, path string, body, into any) {
	t.Helper()
	if err := callAPI(managementURL(r.Container), method, path, body, into); err != nil {
		t.Fatal(err)
	}
}

func rabbitmqSpec(image string) spec {
	return spec{
		kind:  "rabbitmq",
		image: image,
		ports: []string{amqpPort, managementPort},
		env:   []string{"RABBITMQ_DEFAULT_USER=" + rabbitmqUser, "RABBITMQ_DEFAULT_PASS=" + rabbitmqPassword},
		stop:  docker.SIGTERM,
		ready: func(_ context.Context, c *Container) error {
			if err := dialOnce(rabbitmqURL(c)); err != nil {
				return err
			}
			return callAPI(managementURL(c), http.MethodGet, "/overview", nil, nil)
		},
	}
}

func rabbitmqURL(c *Container) string {
	u := url.URL{Scheme: "amqp", User: url.UserPassword(rabbitmqUser, rabbitmqPassword), Host: c.Addr(amqpPort), Path: "/"}
	return u.String()
}

func managementURL(c *Container) string {
	u := url.URL{Scheme: "http", User: url.UserPassword(rabbitmqUser, rabbitmqPassword), Host: c.Addr(managementPort)}
	return u.String()
}

func dialOnce(amqpURL string) error {
	conn, err := dialAMQP(amqpURL)
	if err != nil {
		return err
	}
	return conn.Close()
}

// dialAMQP bounds what amqp.Dial leaves open for 30 s: a server that accepts and does not answer.
func dialAMQP(amqpURL string) (*amqp.Connection, error) {
	return amqp.DialConfig(amqpURL, amqp.Config{Dial: amqp.DefaultDial(5 * time.Second)})
}

// broker is the RabbitMQ that all tests share.
type broker struct {
	url string // with the vhost to fall back to
	api string // "" if the management API does not answer
}

var sharedRabbitMQ = sync.OnceValues(func() (*broker, error) {
	if given := os.Getenv("TEST_AMQP_URL"); given != "" {
		ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
		defer cancel()
		if err := retry(ctx, func(context.Context) error { return dialOnce(given) }); err != nil {
			return nil, fmt.Errorf("TEST_AMQP_URL: %w", err)
		}
		u, err := url.Parse(given)
		if err != nil {
			return nil, errors.New("TEST_AMQP_URL: not a URL")
		}
		b := &broker{url: given, api: os.Getenv("TEST_RABBITMQ_API_URL")}
		if b.api != "" {
			return b, nil
		}
		user := u.User
		if user == nil {
			user = url.UserPassword("guest", "guest")
		}
		api := url.URL{Scheme: "http", User: user, Host: net.JoinHostPort(u.Hostname(), "15672")}
		if callAPI(api.String(), http.MethodGet, "/overview", nil, nil) == nil {
			b.api = api.String()
		}
		return b, nil
	}
	if _, err := engine(); err != nil {
		return nil, fmt.Errorf("no RabbitMQ to test with: set TEST_AMQP_URL to one that runs, or make Docker available (%w)", err)
	}
	refs, err := serverImages()
	if err != nil {
		return nil, err
	}
	c, err := runContainer(context.Background(), rabbitmqSpec(refs["RABBITMQ_IMAGE"]))
	if err != nil {
		return nil, err
	}
	return &broker{url: rabbitmqURL(c), api: managementURL(c)}, nil
})

// Vhost makes an empty vhost for the test and returns its URL. It is deleted, with the connections
// still in it, at the test's end.
//
// A server given by TEST_AMQP_URL that has no management API cannot make vhosts. The tests then use
// the vhost of that URL one after the other, and each deletes the exchange "outbox" at its end.
func Vhost(t testing.TB) string {
	t.Helper()
	Short(t)
	b, err := sharedRabbitMQ()
	if err != nil {
		t.Fatal(err)
	}
	u, err := url.Parse(b.url)
	if err != nil {
		t.Fatal(err)
	}
	if b.api == "" {
		borrowVhost(t, b.url)
		return b.url
	}

	name := uniqueName(t)
	user := "guest"
	if u.User != nil {
		user = u.User.Username()
	}
	call := func(method, path string, body any) {
		t.Helper()
		if err := callAPI(b.api, method, path, body, nil); err != nil {
			t.Fatal(err)
		}
	}
	call(http.MethodPut, "/vhosts/"+name, map[string]any{})
	t.Cleanup(func() { call(http.MethodDelete, "/vhosts/"+name, nil) })
	call(http.MethodPut, "/permissions/"+name+"/"+url.PathEscape(user),
		map[string]string{"configure": ".*", "write": ".*", "read": ".*"})
	u.Path, u.RawPath = "/"+name, ""
	return u.String()
}

// API calls the management API of the server that all tests share: path begins after /api, body is
// sent as JSON unless nil, the answer is stored in into unless nil. Skips the test where a given
// server has none.
func API(t testing.TB, method, path string, body, into any) {
	t.Helper()
	Short(t)
	b, err := sharedRabbitMQ()
	if err != nil {
		t.Fatal(err)
	}
	if b.api == "" {
		t.Skip("needs RabbitMQ's management API: set TEST_RABBITMQ_API_URL")
	}
	if err := callAPI(b.api, method, path, body, into); err != nil {
		t.Fatal(err)
	}
}

func callAPI(base, method, path string, body, into any) error {
	u, err := url.Parse(base)
	if err != nil {
		return errors.New("management API: not a URL")
	}
	user := u.User
	u.User = nil
	var payload io.Reader
	if body != nil {
		b, err := json.Marshal(body)
		if err != nil {
			return err
		}
		payload = bytes.NewReader(b)
	}
	ctx, cancel := context.WithTimeout(context.Background(), 30*time.Second)
	defer cancel()
	req, err := http.NewRequestWithContext(ctx, method, strings.TrimSuffix(u.String(), "/")+"/api"+path, payload)
	if err != nil {
		return err
	}
	req.Close = true // an idle connection would look like a leak
	req.Header.Set("Content-Type", "application/json")
	if user != nil {
		password, _ := user.Password()
		req.SetBasicAuth(user.Username(), password)
	}
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		return err
	}
	defer func() { _ = resp.Body.Close() }()
	answer, err := io.ReadAll(resp.Body)
	if err != nil {
		return err
	}
	if resp.StatusCode >= 300 {
		return fmt.Errorf("management API: %s %s: %s: %.300s", method, path, resp.Status, answer)
	}
	if into == nil {
		return nil
	}
	return json.Unmarshal(answer, into)
}

// borrowed is the vhost that tests use in turn. Guarded by borrowedMu; the file lock excludes the
// other test packages.
var (
	borrowedMu   sync.Mutex
	borrowedFree = sync.NewCond(&borrowedMu)
	borrowedBy   string // a test's name; "" if nobody has it
)

func borrowVhost(t testing.TB, amqpURL string) {
	t.Helper()
	borrowedMu.Lock()
	defer borrowedMu.Unlock()
	for borrowedBy != "" {
		if t.Name() == borrowedBy || strings.HasPrefix(t.Name(), borrowedBy+"/") {
			return // the same test asks again, or one of its parts does
		}
		borrowedFree.Wait()
	}
	lock, err := os.OpenFile(filepath.Join(os.TempDir(), "outbox-relay-vhost.lock"), os.O_CREATE|os.O_RDWR, 0o666)
	if err != nil {
		t.Fatal(err)
	}
	if err := syscall.Flock(int(lock.Fd()), syscall.LOCK_EX); err != nil {
		t.Fatal(err)
	}
	borrowedBy = t.Name()
	t.Cleanup(func() {
		if err := deleteExchange(amqpURL, "outbox"); err != nil {
			t.Errorf("delete exchange: %v", err)
		}
		borrowedMu.Lock()
		defer borrowedMu.Unlock()
		borrowedBy = ""
		borrowedFree.Broadcast()
		_ = lock.Close() // gives up the lock
	})
}

func deleteExchange(amqpURL, name string) error {
	conn, err := dialAMQP(amqpURL)
	if err != nil {
		return err
	}
	defer func() { _ = conn.Close() }()
	ch, err := conn.Channel()
	if err != nil {
		return err
	}
	return ch.ExchangeDelete(name, false, false)
}
