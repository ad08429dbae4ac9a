package testenv

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/ory/dockertest/v3"
	"github.com/ory/dockertest/v3/docker"
)

// defaultLifetime is how long a container may live if nobody removes it, because the tests were
// killed. Longer than the tests of any package take that does not ask for more.
const defaultLifetime = 30 * time.Minute

// Labels of our containers. ownerLabel holds the run's id, expiresLabel a Unix time.
const (
	ownerLabel   = "outbox-relay.test"
	expiresLabel = "outbox-relay.expires"
)

// runID is TEST_RUN_ID, by which whoever starts the tests can find their containers, or our process id.
func runID() string {
	if id := os.Getenv("TEST_RUN_ID"); id != "" {
		return id
	}
	return strconv.Itoa(os.Getpid())
}

// engine is the connection to Docker, made once. It first removes what earlier runs that were
// killed have left behind.
var engine = sync.OnceValues(func() (*dockertest.Pool, error) {
	pool, err := dockertest.NewPool("")
	if err != nil {
		return nil, fmt.Errorf("docker: %w", err)
	}
	ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
	defer cancel()
	if err := pool.Client.PingWithContext(ctx); err != nil {
		return nil, fmt.Errorf("docker: %w", err)
	}
	onEnd(pool.Client.HTTPClient.CloseIdleConnections)

	old, err := pool.Client.ListContainers(docker.ListContainersOptions{
		All: true, Context: ctx,
		Filters: map[string][]string{"label": {ownerLabel}},
	})
	if err != nil {
		return nil, fmt.Errorf("docker: list containers: %w", err)
	}
	for _, c := range old {
		expires, err := strconv.ParseInt(c.Labels[expiresLabel], 10, 64)
		if err == nil && time.Now().Unix() > expires {
			// Whoever else does the same may be faster; that is no fault.
			_ = pool.Client.RemoveContainer(docker.RemoveContainerOptions{ID: c.ID, Force: true, RemoveVolumes: true})
		}
	}
	return pool, nil
})

// serverImages maps POSTGRES_IMAGE and RABBITMQ_IMAGE to references of images that are there.
var serverImages = sync.OnceValues(func() (map[string]string, error) { return provide("postgres", "rabbitmq") })

// relayImage does the same for RELAY_IMAGE.
var relayImage = sync.OnceValues(func() (map[string]string, error) {
	if ref := os.Getenv("RELAY_IMAGE"); ref != "" {
		return map[string]string{"RELAY_IMAGE": ref}, nil
	}
	return provide("relay")
})

// prometheusImage does the same for PROMETHEUS_IMAGE.
var prometheusImage = sync.OnceValues(func() (map[string]string, error) {
	if ref := os.Getenv("PROMETHEUS_IMAGE"); ref != "" {
		return map[string]string{"PROMETHEUS_IMAGE": ref}, nil
	}
	return provide("prometheus")
})

func provide(names ...string) (map[string]string, error) {
	root, err := moduleRoot()
	if err != nil {
		return nil, err
	}
	cmd := exec.Command(filepath.Join(root, "test", "images", "provide"), names...)
	var stderr bytes.Buffer
	cmd.Stderr = &stderr
	out, err := cmd.Output()
	if err != nil {
		return nil, fmt.Errorf("test/images/provide: %w\n%s", err, stderr.Bytes())
	}
	refs := make(map[string]string)
	for line := range strings.Lines(string(out)) {
		name, ref, _ := strings.Cut(strings.TrimSpace(line), "=")
		refs[name] = ref
	}
	return refs, nil
}

// Options of a container of a test's own. The zero value is the plain server.
type Options struct {
	Args   []string // arguments of the server: "-c", "wal_level=logical"
	Env    []string // NAME=value
	Mounts []string // host-path:container-path[:ro]
	Ports  []string // further ports to publish: "5671/tcp"; see Container.Addr
	// Lifetime is how long the container may live if nobody removes it; half an hour by default.
	Lifetime time.Duration
}

// spec is what distinguishes one kind of container from another.
type spec struct {
	kind    string // part of the container's name
	name    string // of container and host; "" is a new one for each container, and kind for the host
	user    string // "" is the image's
	image   string // reference
	ports   []string
	env     []string
	args    []string
	mounts  []string
	stop    docker.Signal
	ready   func(context.Context, *Container) error // tried until it returns nil
	network string                                  // "" is the default bridge
	modify  func(*docker.HostConfig)                // may be nil

	lifetime time.Duration // 0 is defaultLifetime
}

// Container is a running container. Its published ports stay the same when it is stopped and
// started again. A test and its helpers may share one, but not break it at the same time.
type Container struct {
	spec     spec
	pool     *dockertest.Pool
	resource *dockertest.Resource
	ports    map[string]int
	paused   atomic.Bool
	purge    func() error // removes the container; further calls do nothing
}

// runContainer starts a container and waits until it is ready. Main removes it, if nobody did before.
func runContainer(ctx context.Context, s spec) (*Container, error) {
	pool, err := engine()
	if err != nil {
		return nil, err
	}
	if s.lifetime == 0 {
		s.lifetime = defaultLifetime
	}
	repository, tag := s.image, "latest"
	if i := strings.LastIndexByte(s.image, ':'); i > strings.LastIndexByte(s.image, '/') {
		repository, tag = s.image[:i], s.image[i+1:]
	}

	var c *Container
	for attempt := 0; ; attempt++ {
		c = &Container{spec: s, pool: pool, ports: make(map[string]int)}
		bindings := make(map[docker.Port][]docker.PortBinding)
		for _, p := range s.ports {
			port, err := freePort()
			if err != nil {
				return nil, err
			}
			c.ports[p] = port
			bindings[docker.Port(p)] = []docker.PortBinding{{HostIP: "127.0.0.1", HostPort: strconv.Itoa(port)}}
		}
		name, hostname := s.name, s.name
		if name == "" { // RabbitMQ's data belong to a host name
			name, hostname = containerName(s.kind), s.kind
		}
		c.resource, err = pool.RunWithOptions(&dockertest.RunOptions{
			Name: name, Hostname: hostname, User: s.user,
			Repository: repository, Tag: tag,
			Env: s.env, Cmd: s.args, Mounts: s.mounts, ExposedPorts: s.ports, PortBindings: bindings,
			Labels: map[string]string{
				ownerLabel:   runID(),
				expiresLabel: strconv.FormatInt(time.Now().Add(s.lifetime).Unix(), 10),
			},
		}, func(h *docker.HostConfig) {
			h.PublishAllPorts = false
			h.ShmSize = 256 << 20 // PostgreSQL's parallel workers want more than Docker's 64 MiB
			h.NetworkMode = s.network
			if s.modify != nil {
				s.modify(h)
			}
		})
		if err == nil {
			break
		}
		// It may have been created without having been started; a port may have been taken meanwhile.
		_ = pool.RemoveContainerByName(name)
		if attempt == 4 || !strings.Contains(err.Error(), "port is already allocated") &&
			!strings.Contains(err.Error(), "address already in use") {
			return nil, fmt.Errorf("start %s: %w", s.image, err)
		}
	}
	c.purge = sync.OnceValue(c.remove)
	onEnd(func() { report(c.purge()) })
	if err := c.expire(); err != nil {
		return nil, errors.Join(err, c.purge())
	}
	if err := c.awaitReady(ctx); err != nil {
		return nil, errors.Join(err, c.purge())
	}
	return c, nil
}

func containerName(kind string) string {
	return fmt.Sprintf("outbox-relay-test-%s-%08x", kind, rand.Uint32())
}

// Direct returns host:port of a port inside the container's own network, past Docker's proxy, where the
// host can reach it, as on Linux; otherwise it is Addr. It changes when the container is stopped.
func (c *Container) Direct(port string) string {
	number, _, _ := strings.Cut(port, "/")
	addr := net.JoinHostPort(c.IP(), number)
	conn, err := net.DialTimeout("tcp", addr, time.Second)
	if err != nil {
		return c.Addr(port)
	}
	_ = conn.Close()
	return addr
}

// IP is the container's address in the network it shares with other containers.
func (c *Container) IP() string {
	for _, n := range c.resource.Container.NetworkSettings.Networks {
		if n.IPAddress != "" {
			return n.IPAddress
		}
	}
	return c.resource.Container.NetworkSettings.IPAddress
}

func (c *Container) expire() error { return c.resource.Expire(uint(c.spec.lifetime / time.Second)) }

func (c *Container) remove() error {
	if c.paused.Load() {
		_ = c.pool.Client.UnpauseContainer(c.resource.Container.ID)
	}
	return c.pool.Purge(c.resource)
}

func (c *Container) awaitReady(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, startTimeout)
	defer cancel()
	err := retry(ctx, func(ctx context.Context) error {
		err := c.spec.ready(ctx, c)
		if err == nil {
			return nil
		}
		info, inspectErr := c.pool.Client.InspectContainer(c.resource.Container.ID)
		if inspectErr == nil && !info.State.Running {
			return fmt.Errorf("%w: it ended with exit code %d", errGivenUp, info.State.ExitCode)
		}
		return err
	})
	if err != nil {
		return fmt.Errorf("wait for %s: %w\n%s", c.spec.image, err, c.logs())
	}
	return nil
}

// Addr returns host:port of a published port, "5432/tcp" say.
func (c *Container) Addr(port string) string { return fmt.Sprintf("127.0.0.1:%d", c.ports[port]) }

// Stop ends the server as an operator would, and waits for its end.
func (c *Container) Stop(t testing.TB) {
	t.Helper()
	c.signal(t, c.spec.stop)
	c.awaitEnd(t)
}

// Kill ends the server at once, as a crash would.
func (c *Container) Kill(t testing.TB) {
	t.Helper()
	c.signal(t, docker.SIGKILL)
	c.awaitEnd(t)
}

// Start starts a stopped server again, with its data and on its old ports, and waits until it is ready.
func (c *Container) Start(t testing.TB) {
	t.Helper()
	if err := c.pool.Client.StartContainer(c.resource.Container.ID, nil); err != nil {
		t.Fatalf("start %s: %v", c.spec.kind, err)
	}
	if err := c.expire(); err != nil {
		t.Fatal(err)
	}
	if err := c.awaitReady(context.Background()); err != nil {
		t.Fatal(err)
	}
}

// Pause freezes the server: connections stay open, and nothing answers any more.
func (c *Container) Pause(t testing.TB) {
	t.Helper()
	if err := c.pool.Client.PauseContainer(c.resource.Container.ID); err != nil {
		t.Fatalf("pause %s: %v", c.spec.kind, err)
	}
	c.paused.Store(true)
}

// Unpause ends a Pause.
func (c *Container) Unpause(t testing.TB) {
	t.Helper()
	if err := c.pool.Client.UnpauseContainer(c.resource.Container.ID); err != nil {
		t.Fatalf("unpause %s: %v", c.spec.kind, err)
	}
	c.paused.Store(false)
}

// Exec runs a command inside and returns its output, both streams. The test fails if it fails.
func (c *Container) Exec(t testing.TB, cmd ...string) string {
	t.Helper()
	var out bytes.Buffer
	code, err := c.resource.Exec(cmd, dockertest.ExecOptions{StdOut: &out, StdErr: &out})
	if err != nil || code != 0 {
		t.Fatalf("%s in %s: exit code %d, %v\n%s", cmd, c.spec.kind, code, err, out.Bytes())
	}
	return out.String()
}

// Logs returns what the server has written so far.
func (c *Container) Logs() string { return c.logs() }

func (c *Container) logs() string {
	var out bytes.Buffer
	err := c.pool.Client.Logs(docker.LogsOptions{
		Container: c.resource.Container.ID, OutputStream: &out, ErrorStream: &out, Stdout: true, Stderr: true,
	})
	if err != nil {
		return fmt.Sprintf("no logs: %v", err)
	}
	return out.String()
}

func (c *Container) signal(t testing.TB, sig docker.Signal) {
	t.Helper()
	err := c.pool.Client.KillContainer(docker.KillContainerOptions{ID: c.resource.Container.ID, Signal: sig})
	if err != nil {
		t.Fatalf("signal %s: %v", c.spec.kind, err)
	}
}

func (c *Container) awaitEnd(t testing.TB) int {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	code, err := c.pool.Client.WaitContainerWithContext(c.resource.Container.ID, ctx)
	if err != nil {
		t.Fatalf("wait for the end of %s: %v\n%s", c.spec.kind, err, c.logs())
	}
	return code
}

// own starts a container that is the test's alone.
func own(t testing.TB, s spec, o Options) *Container {
	t.Helper()
	s.args = append(s.args, o.Args...)
	s.env = append(s.env, o.Env...)
	s.mounts = append(s.mounts, o.Mounts...)
	s.ports = append(s.ports, o.Ports...)
	s.lifetime = o.Lifetime
	c, err := runContainer(context.Background(), s)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if t.Failed() {
			logs := c.logs()
			t.Logf("end of the log of %s:\n%s", s.kind, logs[max(0, len(logs)-4000):])
		}
		if err := c.purge(); err != nil {
			t.Errorf("remove %s: %v", s.kind, err)
		}
	})
	return c
}

// needDocker skips a test that needs a container of its own where the servers are given and there is no
// Docker, and fails it where neither is there.
func needDocker(t testing.TB, variable string) {
	t.Helper()
	Short(t)
	if _, err := engine(); err != nil {
		if os.Getenv(variable) != "" {
			t.Skipf("needs a container of its own, and there is no Docker: %v", err)
		}
		t.Fatalf("needs a container of its own: make Docker available (%v)", err)
	}
}

func imageOf(t testing.TB, variable string) string {
	t.Helper()
	refs, err := serverImages()
	if err != nil {
		t.Fatal(err)
	}
	return refs[variable]
}
