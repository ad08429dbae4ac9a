package main

import (
	"encoding/json"
	"errors"
	"fmt"
	"strconv"
	"strings"
)

// template is a parsed AMQP_EXCHANGE or AMQP_ROUTING_KEY: text with placeholders that an event
// fills in. The zero value is the empty text. It is never changed, so goroutines may share it.
type template struct {
	parts []templatePart
}

// templatePart is either text or one placeholder.
type templatePart struct {
	kind   partKind
	text   string // of a textPart
	header string // NAME of {header.NAME}
}

type partKind int

const (
	textPart partKind = iota
	aggregateTypePart
	aggregateIDPart
	eventTypePart
	headerPart
)

const templateHelp = "allowed are {aggregate_type}, {aggregate_id}, {event_type} and {header.NAME}; {{ and }} stand for braces"

// parseTemplate reads a template; its errors are for the operator who wrote the setting.
func parseTemplate(s string) (template, error) {
	var t template
	var text strings.Builder
	flush := func() {
		if text.Len() > 0 {
			t.parts = append(t.parts, templatePart{text: text.String()})
			text.Reset()
		}
	}
	for rest := s; rest != ""; {
		i := strings.IndexAny(rest, "{}")
		if i < 0 {
			text.WriteString(rest)
			break
		}
		text.WriteString(rest[:i])
		brace := rest[i]
		rest = rest[i+1:]
		if rest != "" && rest[0] == brace { // doubled: a brace of the text itself
			text.WriteByte(brace)
			rest = rest[1:]
			continue
		}
		if brace == '}' {
			return template{}, fmt.Errorf("template %q: } without {; %s", s, templateHelp)
		}
		name, after, closed := strings.Cut(rest, "}")
		if !closed || strings.Contains(name, "{") {
			return template{}, fmt.Errorf("template %q: { without }; %s", s, templateHelp)
		}
		part, ok := parsePlaceholder(name)
		if !ok {
			return template{}, fmt.Errorf("template %q: unknown placeholder {%s}; %s", s, name, templateHelp)
		}
		flush()
		t.parts = append(t.parts, part)
		rest = after
	}
	flush()
	return t, nil
}

func parsePlaceholder(name string) (templatePart, bool) {
	switch name {
	case "aggregate_type":
		return templatePart{kind: aggregateTypePart}, true
	case "aggregate_id":
		return templatePart{kind: aggregateIDPart}, true
	case "event_type":
		return templatePart{kind: eventTypePart}, true
	}
	header, ok := strings.CutPrefix(name, "header.")
	return templatePart{kind: headerPart, header: header}, ok && header != ""
}

// static reports whether the template expands to the same text for every event.
func (t template) static() bool {
	return len(t.parts) == 0 || len(t.parts) == 1 && t.parts[0].kind == textPart
}

// expand fills in the event's values. headers is the decoded headers column, its numbers still
// json.Number so that they keep their digits; nil when there is none. A static template or a
// single placeholder allocates nothing.
func (t template) expand(e *Event, headers map[string]any) (string, error) {
	switch len(t.parts) {
	case 0:
		return "", nil
	case 1:
		return t.parts[0].value(e, headers)
	}
	var b strings.Builder
	for _, p := range t.parts {
		v, err := p.value(e, headers)
		if err != nil {
			return "", err
		}
		b.WriteString(v)
	}
	return b.String(), nil
}

func (p templatePart) value(e *Event, headers map[string]any) (string, error) {
	switch p.kind {
	case textPart:
		return p.text, nil
	case aggregateTypePart:
		return e.AggregateType, nil
	case aggregateIDPart:
		return e.AggregateID, nil
	case eventTypePart:
		return e.EventType, nil
	}
	v, ok := headers[p.header]
	if !ok {
		return "", fmt.Errorf("header %s, which the route needs, is missing", quoteName(p.header))
	}
	text, err := scalarText(v)
	if err != nil {
		return "", fmt.Errorf("header %s, which the route needs, %w", quoteName(p.header), err)
	}
	return text, nil
}

var errNotScalar = errors.New("is not a string, a number or a boolean")

// scalarText returns the text of a string, number or boolean as encoding/json decodes them with
// UseNumber.
func scalarText(v any) (string, error) {
	switch v := v.(type) {
	case string:
		return v, nil
	case json.Number:
		return v.String(), nil
	case bool:
		return strconv.FormatBool(v), nil
	}
	return "", errNotScalar
}
