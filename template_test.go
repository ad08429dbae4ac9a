package main

import (
	"encoding/json"
	"strings"
	"testing"
)

func mustTemplate(tb testing.TB, s string) template {
	tb.Helper()
	t, err := parseTemplate(s)
	if err != nil {
		tb.Fatal(err)
	}
	return t
}

func TestTemplateExpands(t *testing.T) {
	t.Parallel()
	headers := map[string]any{
		"tenant": "acme", "shard": json.Number("10.50"), "vip": true, "a b.c": "odd",
		"null": nil, "list": []any{"x"}, "object": map[string]any{},
	}
	tests := []struct {
		name, template string
		want           string
		static         bool
		wantErr        string // a part of it; "" is none
	}{
		{name: "nothing stays nothing", template: "", want: "", static: true},
		{name: "plain text stays as it is", template: "outbox", want: "outbox", static: true},
		{name: "doubled braces are braces", template: "a{{b}}c", want: "a{b}c", static: true},
		{name: "a doubled brace may touch a placeholder", template: "{{{event_type}}}", want: "{order.placed}"},
		{name: "the event type alone", template: "{event_type}", want: "order.placed"},
		{name: "all of the event", template: "{aggregate_type}.{aggregate_id}.{event_type}", want: "order.42.order.placed"},
		{name: "text around a placeholder", template: "x.{aggregate_id}.y", want: "x.42.y"},
		{name: "a header's text", template: "{header.tenant}", want: "acme"},
		{name: "a header's number keeps its digits", template: "s{header.shard}", want: "s10.50"},
		{name: "a header's boolean", template: "{header.vip}", want: "true"},
		{name: "a header's name may hold anything but braces", template: "{header.a b.c}", want: "odd"},
		{name: "a missing header is named", template: "{header.nope}", wantErr: `header "nope", which the route needs, is missing`},
		{name: "a null header is named", template: "x.{header.null}", wantErr: `header "null", which the route needs, is not a string`},
		{name: "a list cannot be text", template: "{header.list}", wantErr: `header "list", which`},
		{name: "an object cannot be text", template: "{header.object}", wantErr: `header "object", which`},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			tmpl := mustTemplate(t, tt.template)
			if got := tmpl.static(); got != tt.static {
				t.Errorf("static() = %v", got)
			}
			got, err := tmpl.expand(testEvent(), headers)
			checkErr(t, err, tt.wantErr)
			if got != tt.want {
				t.Errorf("expand() = %q, want %q", got, tt.want)
			}
		})
	}
}

func TestTemplateRefuses(t *testing.T) {
	t.Parallel()
	tests := []struct{ name, template, wantErr string }{
		{"an unknown placeholder is named", "a.{type}", "unknown placeholder {type}"},
		{"an empty placeholder", "{}", "unknown placeholder {}"},
		{"a header without a name", "{header.}", "unknown placeholder {header.}"},
		{"a placeholder in other case", "{Event_Type}", "unknown placeholder {Event_Type}"},
		{"a brace that is never closed", "a.{event_type", "{ without }"},
		{"a brace within a placeholder", "{event_{type}", "{ without }"},
		{"a brace at the end", "a{", "{ without }"},
		{"a brace that was never opened", "event_type}.a", "} without {"},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			_, err := parseTemplate(tt.template)
			checkErr(t, err, tt.wantErr)
			if err != nil && !strings.Contains(err.Error(), "{header.NAME}") {
				t.Errorf("%q does not list what is allowed", err)
			}
		})
	}
}

func TestTemplateAllocatesNothingForOnePart(t *testing.T) {
	e := testEvent()
	headers := map[string]any{"tenant": "acme"}
	for _, s := range []string{"", "outbox", "{event_type}", "{header.tenant}"} {
		tmpl := mustTemplate(t, s)
		if n := testing.AllocsPerRun(100, func() { _, _ = tmpl.expand(e, headers) }); n != 0 {
			t.Errorf("%q: %v allocations, want 0", s, n)
		}
	}
}

func FuzzTemplate(f *testing.F) {
	for _, s := range []string{"", "outbox", "{event_type}", "{aggregate_type}.{header.a}", "{{x}}", "{{{event_type}}}", "}{", "{header.", "{"} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, s string) {
		tmpl, err := parseTemplate(s)
		if err != nil {
			return
		}
		got, err := tmpl.expand(testEvent(), nil)
		switch {
		case err != nil && !strings.Contains(s, "{header."):
			t.Errorf("%q: %v, though it names no header", s, err)
		case tmpl.static() && got != strings.NewReplacer("{{", "{", "}}", "}").Replace(s):
			t.Errorf("%q expands to %q", s, got)
		}
	})
}

// checkErr fails the test unless err has the wanted part; no error is wanted for "".
func checkErr(tb testing.TB, err error, want string) {
	tb.Helper()
	switch {
	case want == "" && err != nil:
		tb.Errorf("unexpected error: %v", err)
	case want != "" && err == nil:
		tb.Errorf("no error, want one with %q", want)
	case want != "" && !strings.Contains(err.Error(), want):
		tb.Errorf("error %q, want one with %q", err, want)
	}
}
