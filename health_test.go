package main

import (
	"errors"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

func TestHealth(t *testing.T) {
	tests := []struct {
		name  string
		do    func(*Health)
		ok    bool
		lines []string
	}{
		{"nothing is fine before it was seen to be", func(*Health) {}, false, []string{"postgres: starting", "rabbitmq: starting"}},
		{"one that is not fine is enough", func(h *Health) { h.Set("postgres", nil) }, false, []string{"postgres: ok", "rabbitmq: starting"}},
		{"all fine", func(h *Health) { h.Set("rabbitmq", nil); h.Set("postgres", nil) }, true, []string{"postgres: ok", "rabbitmq: ok"}},
		{"a reason of several lines becomes one", func(h *Health) {
			h.Set("postgres", errors.New("dial:\n  no\troute"))
			h.Set("rabbitmq", nil)
		}, false, []string{"postgres: dial: no route", "rabbitmq: ok"}},
		{
			"not ready while it ends, however fine", func(h *Health) { h.Set("rabbitmq", nil); h.Set("postgres", nil); h.Stop() }, false,
			[]string{"shutting down", "postgres: ok", "rabbitmq: ok"},
		},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			h := newHealth("postgres", "rabbitmq")
			tt.do(h)
			ok, lines := h.Ready()
			if ok != tt.ok {
				t.Errorf("ok = %v, want %v", ok, tt.ok)
			}
			if diff := cmp.Diff(tt.lines, lines); diff != "" {
				t.Error(diff)
			}
		})
	}
}

func TestHealthCutsLongReasons(t *testing.T) {
	h := newHealth("postgres")
	h.Set("postgres", errors.New(strings.Repeat("ä", 1000)))
	if _, lines := h.Ready(); len(lines[0]) > maxReason+20 {
		t.Errorf("%d bytes", len(lines[0]))
	}
}
