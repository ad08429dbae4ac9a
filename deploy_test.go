package main

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"go.yaml.in/yaml/v2"

	"outbox-relay/internal/testenv"
)

// document is one document of a YAML file, or a part of it.
type document map[any]any

// documents reads all documents of the files that match.
func documents(t *testing.T, pattern string) (all []document) {
	t.Helper()
	files, err := filepath.Glob(pattern)
	if err != nil || len(files) == 0 {
		t.Fatal(pattern, err)
	}
	for _, file := range files {
		text, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		for d := yaml.NewDecoder(bytes.NewReader(text)); ; {
			var doc document
			err := d.Decode(&doc)
			if errors.Is(err, io.EOF) {
				break
			}
			if err != nil {
				t.Fatalf("%s: %v", file, err)
			}
			all = append(all, doc)
		}
	}
	return all
}

// all returns the values of a key at any depth.
func (d document) all(key string) (values []any) {
	var walk func(any)
	walk = func(v any) {
		switch v := v.(type) {
		case document:
			for k, inner := range v {
				if k == key {
					values = append(values, inner)
				}
				walk(inner)
			}
		case map[any]any:
			walk(document(v))
		case []any:
			for _, inner := range v {
				walk(inner)
			}
		}
	}
	walk(d)
	return values
}

func TestKubernetesManifestsFitTheRelay(t *testing.T) {
	known := make(map[string]bool)
	for _, s := range (Config{}).settings() {
		known[s.name] = true
	}
	base := "http://" + testServer(t, newHealth(), "")
	kinds := make(map[string]int)
	for _, doc := range documents(t, "deploy/kubernetes/*.yaml") {
		kind, _ := doc["kind"].(string)
		kinds[kind]++
		for _, env := range doc.all("env") {
			for _, e := range env.([]any) {
				if name := e.(document)["name"].(string); !known[name] {
					t.Errorf("%s sets %s, which is no setting", kind, name)
				}
			}
		}
		for _, path := range doc.all("path") {
			if status, _ := ask(t, "GET", base+path.(string)); status == http.StatusNotFound {
				t.Errorf("%s asks for %v, which is not there", kind, path)
			}
		}
		for _, port := range append(doc.all("containerPort"), doc.all("port")...) {
			if n, ok := port.(int); ok && n != 9090 { // the default of HTTP_ADDR
				t.Errorf("%s: port %d, want that of HTTP_ADDR", kind, n)
			}
		}
		for _, grace := range doc.all("terminationGracePeriodSeconds") {
			if least := validConfig(t).ShutdownTimeout + shutdownGrace; float64(grace.(int)) <= least.Seconds() {
				t.Errorf("%s grants %v s, not more than SHUTDOWN_TIMEOUT", kind, grace)
			}
		}
		if len(doc.all("containers")) > 0 {
			for key, want := range map[string]any{
				"runAsNonRoot": true, "readOnlyRootFilesystem": true, "allowPrivilegeEscalation": false, "automountServiceAccountToken": false,
			} {
				if got := doc.all(key); !slices.Contains(got, want) {
					t.Errorf("%s: %s = %v, want %v", kind, key, got, want)
				}
			}
		}
	}
	for _, kind := range []string{"Deployment", "PodDisruptionBudget", "Service", "ServiceMonitor", "Job"} {
		if kinds[kind] != 1 {
			t.Errorf("%d documents of kind %s, want one", kinds[kind], kind)
		}
	}
}

func TestProductionComposeFileFitsTheRelay(t *testing.T) {
	for _, doc := range documents(t, "deploy/compose.yaml") {
		for _, env := range doc.all("environment") {
			for name := range env.(document) {
				if !slices.ContainsFunc((Config{}).settings(), func(s setting) bool { return s.name == name }) {
					t.Errorf("%v is no setting", name)
				}
			}
		}
	}
}

// registered are the names of all series that the relay can have.
func registered(t *testing.T) map[string]bool {
	t.Helper()
	reg := newRegistry()
	newMetrics(reg)
	families, err := reg.Gather()
	if err != nil {
		t.Fatal(err)
	}
	names := map[string]bool{"up": true}
	for _, f := range families {
		names[f.GetName()] = true
		if f.GetType().String() == "HISTOGRAM" {
			for _, suffix := range []string{"_bucket", "_count", "_sum"} {
				names[f.GetName()+suffix] = true
			}
		}
	}
	return names
}

var seriesName = regexp.MustCompile(`\b(outbox|process|go)_[a-z0-9_]+`)

// assertSeries fails the test for a query that names what the relay does not have.
func assertSeries(t *testing.T, what, query string, names map[string]bool) {
	t.Helper()
	found := seriesName.FindAllString(query, -1)
	if len(found) == 0 && !strings.Contains(query, "up") {
		t.Errorf("%s: no series in %q", what, query)
	}
	for _, name := range found {
		if !names[name] {
			t.Errorf("%s: the relay has no %s", what, name)
		}
	}
}

func TestAlertsNameRealSeriesAndTheirPages(t *testing.T) {
	names := registered(t)
	runbook, err := os.ReadFile("docs/runbook.md")
	if err != nil {
		t.Fatal(err)
	}
	tests, err := os.ReadFile("deploy/prometheus/alerts_test.yml")
	if err != nil {
		t.Fatal(err)
	}
	alerts := 0
	for _, doc := range documents(t, "deploy/prometheus/alerts.yml") {
		for _, rules := range doc.all("rules") {
			for _, r := range rules.([]any) {
				rule := r.(document)
				name := rule["alert"].(string)
				alerts++
				assertSeries(t, name, rule["expr"].(string), names)
				if !strings.Contains(string(runbook), "\n## "+name+"\n") {
					t.Errorf("%s has no page in the runbook", name)
				}
				annotations := rule["annotations"].(document)
				if want := "docs/runbook.md#" + strings.ToLower(name); annotations["runbook"] != want {
					t.Errorf("%s: runbook = %v, want %s", name, annotations["runbook"], want)
				}
				for _, say := range []string{name + " fires", name + " is silent"} {
					if !strings.Contains(string(tests), say) {
						t.Errorf("no test that %s", say)
					}
				}
				for _, key := range []string{"summary", "description"} {
					if annotations[key] == nil {
						t.Errorf("%s has no %s", name, key)
					}
				}
			}
		}
	}
	if pages := strings.Count(string(runbook), "\n## Outbox"); pages != alerts {
		t.Errorf("%d alerts, and %d pages in the runbook", alerts, pages)
	}
}

func TestAlertsFireWhenTheyShould(t *testing.T) {
	testenv.Promtool(t, "deploy/prometheus", "check", "rules", "alerts.yml")
	testenv.Promtool(t, "deploy/prometheus", "test", "rules", "alerts_test.yml")
}

func TestDashboardNamesRealSeries(t *testing.T) {
	names := registered(t)
	text, err := os.ReadFile("deploy/grafana/dashboard.json")
	if err != nil {
		t.Fatal(err)
	}
	var board struct {
		Panels []struct {
			Title   string
			Targets []struct{ Expr string }
		}
	}
	if err := json.Unmarshal(text, &board); err != nil {
		t.Fatal(err)
	}
	// Each query as a rule, which promtool then parses.
	variables := strings.NewReplacer("$__rate_interval", "5m", "$job", ".*")
	var rules []map[string]string
	for _, p := range board.Panels {
		for _, q := range p.Targets {
			assertSeries(t, p.Title, q.Expr, names)
			rules = append(rules, map[string]string{"record": fmt.Sprintf("query:%d", len(rules)), "expr": variables.Replace(q.Expr)})
		}
	}
	if len(rules) == 0 {
		t.Fatal("no queries")
	}
	file, err := yaml.Marshal(map[string]any{"groups": []any{map[string]any{"name": "dashboard", "rules": rules}}})
	if err != nil {
		t.Fatal(err)
	}
	dir := t.TempDir()
	if err := errors.Join(os.Chmod(dir, 0o755), os.WriteFile(filepath.Join(dir, "queries.yml"), file, 0o644)); err != nil {
		t.Fatal(err)
	}
	testenv.Promtool(t, dir, "check", "rules", "queries.yml")
}
