package testenv

import (
	"context"
	"os/exec"
	"path/filepath"
	"testing"
)

// Promtool runs Prometheus's promtool on the files in dir, which are its working directory, and returns
// what it prints. The test fails if it fails.
func Promtool(t testing.TB, dir string, args ...string) string {
	t.Helper()
	needDocker(t, "TEST_DATABASE_URL")
	refs, err := promtoolImage()
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
		"-v", dir + ":/rules:ro", "-w", "/rules", "--entrypoint", "promtool", refs["PROMTOOL_IMAGE"],
	}, args...)...)
	out, err := cmd.CombinedOutput()
	if err != nil {
		t.Fatalf("promtool %s: %v\n%s", args, err, out)
	}
	return string(out)
}
