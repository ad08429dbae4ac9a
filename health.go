package main

import (
	"errors"
	"fmt"
	"strings"
	"sync"
)

// errStarting is what every check says until it is set for the first time.
var errStarting = errors.New("starting")

// maxReason bounds what a check may say, in bytes: reasons hold errors of servers.
const maxReason = 300

// Health collects whether the relay could do its work, and if not, why. It answers readiness;
// liveness is only that the process serves, since an outage elsewhere is no reason to kill a
// relay that waits for its end. Safe for concurrent use; make it with newHealth.
type Health struct {
	mu       sync.Mutex // guards the fields below; nothing slow runs under it
	order    []string
	checks   map[string]error // nil: fine
	stopping bool
}

// newHealth makes a Health of these checks, none of them fine yet.
func newHealth(checks ...string) *Health {
	h := &Health{checks: make(map[string]error)}
	for _, c := range checks {
		h.Set(c, errStarting)
	}
	return h
}

// Set records the state of a check: nil is fine, anything else the reason why it is not. Anybody
// who reaches the HTTP address reads the reason, so it must hold no secret.
func (h *Health) Set(check string, err error) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if _, ok := h.checks[check]; !ok {
		h.order = append(h.order, check)
	}
	h.checks[check] = err
}

// Stop makes the relay not ready for good, because it is about to end.
func (h *Health) Stop() {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.stopping = true
}

// Ready reports whether every check is fine, and one line on each.
func (h *Health) Ready() (ok bool, lines []string) {
	h.mu.Lock()
	defer h.mu.Unlock()
	ok = true
	if h.stopping {
		ok, lines = false, append(lines, "shutting down")
	}
	for _, c := range h.order {
		if err := h.checks[c]; err != nil {
			ok, lines = false, append(lines, fmt.Sprintf("%s: %s", c, oneLine(err.Error())))
			continue
		}
		lines = append(lines, c+": ok")
	}
	return ok, lines
}

// oneLine folds white space and cuts what is too long.
func oneLine(s string) string {
	s = strings.Join(strings.Fields(s), " ")
	if len(s) > maxReason {
		s = strings.ToValidUTF8(s[:maxReason], "") + "..."
	}
	return s
}
