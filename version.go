package main

import (
	"fmt"
	"runtime"
	"runtime/debug"

	"github.com/prometheus/client_golang/prometheus"
)

// Set when a release is built: -ldflags "-X main.version=1.2.3 -X main.revision=abcdef".
var (
	version  = "dev"
	revision string // empty: what the Go tool noted, see buildRevision
)

// buildRevision is the commit the binary was built from, with "-dirty" when the tree had changes;
// "unknown" where the build saw no repository, in an image say.
func buildRevision() string {
	if revision != "" {
		return revision
	}
	settings := make(map[string]string)
	if info, ok := debug.ReadBuildInfo(); ok {
		for _, s := range info.Settings {
			settings[s.Key] = s.Value
		}
	}
	commit := settings["vcs.revision"]
	switch {
	case commit == "":
		return "unknown"
	case settings["vcs.modified"] == "true":
		return commit + "-dirty"
	}
	return commit
}

func versionLine() string {
	return fmt.Sprintf("outbox-relay %s (revision %s, %s, %s/%s)", version, buildRevision(), runtime.Version(), runtime.GOOS, runtime.GOARCH)
}

// registerBuildInfo adds the series that says which build this is.
func registerBuildInfo(reg prometheus.Registerer) {
	reg.MustRegister(prometheus.NewGaugeFunc(prometheus.GaugeOpts{
		Name:        "outbox_build_info",
		Help:        "Always 1; which build of the relay this is.",
		ConstLabels: prometheus.Labels{"version": version, "revision": buildRevision(), "goversion": runtime.Version()},
	}, func() float64 { return 1 }))
}
