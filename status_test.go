package main

import (
	"fmt"
	"os"
	"reflect"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"outbox-relay/internal/testenv"
	sqlfiles "outbox-relay/sql"
)

func TestGrowthIsMeasuredBetweenLeaps(t *testing.T) {
	type look struct {
		at time.Duration
		n  int64
	}
	for _, tc := range []struct {
		name  string
		looks []look
		want  float64
	}{
		{"nothing happens", []look{{0, 7}, {time.Second, 7}}, 0},
		{"one look", []look{{0, 7}}, 0},
		{"a session reports once a second", []look{{0, 0}, {300 * time.Millisecond, 900}, {1300 * time.Millisecond, 1900}, {2300 * time.Millisecond, 2900}, {2500 * time.Millisecond, 2900}}, 1000},
		{"few events", []look{{0, 0}, {100 * time.Millisecond, 1}, {200 * time.Millisecond, 2}, {2 * time.Second, 2}}, 1},
		{"one leap", []look{{0, 0}, {time.Second, 500}, {2 * time.Second, 500}}, 250},
		{"statistics are reset", []look{{0, 1000}, {time.Second, 3}, {2 * time.Second, 3}}, 0},
	} {
		var g growth
		for _, l := range tc.looks {
			g.add(l.at, l.n)
		}
		if got := g.perSecond(); got != tc.want {
			t.Errorf("%s: %v/s, want %v", tc.name, got, tc.want)
		}
	}
}

// jsonPaths lists what a value looks like in JSON: "held[].waiting.count".
func jsonPaths(typ reflect.Type, path string) (paths []string) {
	switch typ.Kind() {
	case reflect.Pointer:
		return jsonPaths(typ.Elem(), path)
	case reflect.Slice:
		return jsonPaths(typ.Elem(), path+"[]")
	case reflect.Struct:
		if typ == reflect.TypeFor[time.Time]() {
			break
		}
		for i := range typ.NumField() {
			name := typ.Field(i).Tag.Get("json")
			if name == "" || name == "-" {
				continue
			}
			paths = append(paths, jsonPaths(typ.Field(i).Type, strings.TrimPrefix(path+"."+name, "."))...)
		}
		return paths
	}
	return []string{path}
}

// documentedPaths are the fields in the table of a section of docs/commands.md.
func documentedPaths(t *testing.T, section string) (paths []string) {
	t.Helper()
	page, err := os.ReadFile("docs/commands.md")
	if err != nil {
		t.Fatal(err)
	}
	_, text, _ := strings.Cut(string(page), "\n## "+section+"\n")
	text, _, _ = strings.Cut(text, "\n## ")
	for _, row := range regexp.MustCompile("(?m)^\\| (`[a-z_.\\[\\]]+`(?:, `[a-z_.\\[\\]]+`)*) \\|").FindAllStringSubmatch(text, -1) {
		for _, name := range strings.Split(row[1], ", ") {
			paths = append(paths, strings.Trim(name, "`"))
		}
	}
	slices.Sort(paths)
	return paths
}

func TestStatusInJSONIsDocumented(t *testing.T) {
	have := jsonPaths(reflect.TypeFor[Status](), "")
	slices.Sort(have)
	if diff := cmp.Diff(have, documentedPaths(t, "status")); diff != "" {
		t.Errorf("docs/commands.md differs (-status +page):\n%s", diff)
	}
}

// What status asks must not become a load: no statement reads the table itself.
func TestStatusReadsIndexesOnly(t *testing.T) {
	_, db := testenv.OpenDatabase(t)
	testenv.MustExec(t, db, sqlfiles.Schema)
	testenv.MustExec(t, db, "ANALYZE outbox_events") // as it is empty: the worst that statistics can be
	testenv.MustExec(t, db, `INSERT INTO outbox_events (aggregate_type, aggregate_id, event_type, payload, processed_at, retry_after, dead_at)
		SELECT 'order', (i % 1000)::text, 'order.created', '{}',
		       CASE WHEN i % 100 > 5 THEN now() END,
		       CASE WHEN i % 100 IN (1, 2) THEN now() END,
		       CASE WHEN i % 100 = 2 THEN now() END
		FROM generate_series(1, 100000) i`)
	tx := testenv.Begin(t, db, sqlfiles.Status("planner"))
	for name, args := range map[string]string{"backlog": "1000000", "held": "10000, true, 5"} {
		prepared := strings.ReplaceAll(name, " ", "_")
		testenv.MustExec(t, tx, fmt.Sprintf("PREPARE %s AS %s", prepared, sqlfiles.Status(name)))
		if plan := explain(t, tx, fmt.Sprintf("EXECUTE %s(%s)", prepared, args)); strings.Contains(plan, "Seq Scan") {
			t.Errorf("%s reads the whole table:\n%s", name, plan)
		}
	}
}
