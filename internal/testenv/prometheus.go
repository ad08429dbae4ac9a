package testenv

import (
	"context"
	"fmt"
	"net/http"
	"os/exec"
	"path/filepath"
	"strconv"
	"testing"
)

// Promtool runs Prometheus's promtool on the files in dir, which are its working directory, and returns
// what it prints. The test fails if it fails.
func Promtool(t testing.TB, dir string, args ...string) string {
	t.Helper()
	needDocker(t, "TEST_DATABASE_URL")
	refs, err := prometheusImage()
	if err != nil {
		t.Fatal(err)
	}
	dir, err = filepath.Abs(dir)
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(context.Background(), startTimeout)
	defer cancel()
	cmd := exec.CommandContext(ctx, "docker", append([]string{
		"run", "--rm", "--network", "none", "--label", ownerLabel + "=" + runID(),
		"-v", dir + ":/rules:ro", "-w", "/rules", "--entrypoint", "promtool", refs["PROMETHEUS_IMAGE"],
	}, args...)...)
	out, err := cmd.CombinedOutput()
	if err != nil {
		t.Fatalf("promtool %s: %v\n%s", args, err, out)
	}
	return string(out)
}

// Prometheus runs a Prometheus with the prometheus.yml in dir, and returns its URL. It shares the host's
// network, as the relays that it is to scrape do.
func Prometheus(t testing.TB, dir string) (url string) {
	t.Helper()
	needDocker(t, "TEST_DATABASE_URL")
	refs, err := prometheusImage()
	if err != nil {
		t.Fatal(err)
	}
	addr := "127.0.0.1:" + strconv.Itoa(FreePort(t))
	ctx, cancel := context.WithTimeout(context.Background(), startTimeout)
	defer cancel()
	c, err := runContainer(ctx, spec{
		kind: "prometheus", image: refs["PROMETHEUS_IMAGE"], network: "host", mounts: []string{dir + ":/rules:ro"},
		args: []string{"--config.file=/rules/prometheus.yml", "--storage.tsdb.path=/tmp/data", "--web.listen-address=" + addr},
		ready: func(ctx context.Context, _ *Container) error {
			req, err := http.NewRequestWithContext(ctx, http.MethodGet, "http://"+addr+"/-/ready", nil)
			if err != nil {
				return err
			}
			resp, err := http.DefaultClient.Do(req)
			if err != nil {
				return err
			}
			_ = resp.Body.Close()
			if resp.StatusCode != http.StatusOK {
				return fmt.Errorf("not ready: %s", resp.Status)
			}
			return nil
		},
	})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := c.purge(); err != nil {
			t.Error(err)
		}
	})
	return "http://" + addr
}
