package testenv

import (
	"context"
	"fmt"
	"net/http"
	"strconv"
	"testing"

	"github.com/ory/dockertest/v3/docker"
)

// RelayContainer is the relay's image, running.
type RelayContainer struct {
	*Container
	HTTPAddr string // host:port of /metrics, /livez and /readyz
}

// RunImage builds the relay's image from this checkout, or takes the one that RELAY_IMAGE names, and
// runs it as production should: with a read-only root, without capabilities, as the image's own user.
// It shares the host's network, so that it finds the servers under the same URLs as the test does.
// It has no more than so many bytes of memory; 0 is no limit. It is removed at the test's end.
func RunImage(t testing.TB, memory int64, env ...string) *RelayContainer {
	t.Helper()
	needDocker(t, "TEST_DATABASE_URL")
	refs, err := relayImage()
	if err != nil {
		t.Fatal(err)
	}
	addr := "127.0.0.1:" + strconv.Itoa(FreePort(t))
	c := own(t, spec{
		kind:    "relay",
		image:   refs["RELAY_IMAGE"],
		network: "host",
		env:     append([]string{"HTTP_ADDR=" + addr}, env...),
		stop:    docker.SIGTERM,
		ready: func(context.Context, *Container) error {
			status, _, err := get("http://" + addr + "/livez")
			if err == nil && status != http.StatusOK {
				err = fmt.Errorf("/livez = %d", status)
			}
			return err
		},
		modify: func(h *docker.HostConfig) {
			h.Memory, h.MemorySwap = memory, memory
			h.ReadonlyRootfs = true
			h.CapDrop = []string{"ALL"}
			h.SecurityOpt = []string{"no-new-privileges"}
		},
	}, Options{})
	return &RelayContainer{Container: c, HTTPAddr: addr}
}

// Stop ends the relay with SIGTERM and returns its exit code.
func (c *RelayContainer) Stop(t testing.TB) int {
	t.Helper()
	c.signal(t, c.spec.stop)
	return c.awaitEnd(t)
}

// Health returns what Docker makes of the image's HEALTHCHECK: starting, healthy or unhealthy.
func (c *RelayContainer) Health(t testing.TB) string {
	t.Helper()
	info, err := c.pool.Client.InspectContainer(c.resource.Container.ID)
	if err != nil {
		t.Fatal(err)
	}
	return info.State.Health.Status
}

// User returns the user the image runs as.
func (c *RelayContainer) User() string { return c.resource.Container.Config.User }
