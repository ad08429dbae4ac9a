package main

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"net/http"
	"os"
	"path/filepath"
	"reflect"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

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
		if len(doc.all("containers")) > 0 {
			assertPod(t, kind, doc)
		}
	}
	for _, kind := range []string{"Deployment", "PodDisruptionBudget", "Service", "ServiceMonitor", "Job"} {
		if kinds[kind] != 1 {
			t.Errorf("%d documents of kind %s, want one", kinds[kind], kind)
		}
	}
}

// assertPod fails the test unless a document's pods have no more rights than they need, the time that a shutdown takes,
// and their secrets as files.
func assertPod(t *testing.T, kind string, doc document) {
	t.Helper()
	for key, want := range map[string]any{
		"runAsNonRoot": true, "readOnlyRootFilesystem": true, "allowPrivilegeEscalation": false,
		"automountServiceAccountToken": false, "drop": []any{"ALL"}, "seccompProfile": document{"type": "RuntimeDefault"},
	} {
		got := doc.all(key)
		if len(got) == 0 {
			t.Errorf("%s: no %s", kind, key)
		}
		for _, v := range got {
			if !reflect.DeepEqual(v, want) {
				t.Errorf("%s: %s = %v, want %v", kind, key, v, want)
			}
		}
	}
	shutdown := validConfig(t).ShutdownTimeout
	for _, env := range doc.all("env") {
		for _, e := range env.([]any) {
			name, value := e.(document)["name"].(string), fmt.Sprint(e.(document)["value"])
			if secretSettings[name] {
				t.Errorf("%s: %s is a secret, want it as a file", kind, name)
			}
			if name == "SHUTDOWN_TIMEOUT" {
				var err error
				if shutdown, err = time.ParseDuration(value); err != nil {
					t.Errorf("%s: %s: %v", kind, name, err)
				}
			}
		}
	}
	if kind != "Deployment" {
		return
	}
	for _, probe := range []string{"livenessProbe", "readinessProbe", "limits"} {
		if len(doc.all(probe)) != 1 {
			t.Errorf("%s: no %s", kind, probe)
		}
	}
	for _, grace := range doc.all("terminationGracePeriodSeconds") {
		if least := shutdown + shutdownGrace; float64(grace.(int)) <= least.Seconds() {
			t.Errorf("%s grants %v s, not more than SHUTDOWN_TIMEOUT=%v", kind, grace, shutdown)
		}
	}
}

var secretSettings = map[string]bool{"DATABASE_URL": true, "AMQP_URL": true}

func TestProductionComposeFileFitsTheRelay(t *testing.T) {
	for _, doc := range documents(t, "deploy/compose.yaml") {
		for _, env := range doc.all("environment") {
			for name := range env.(document) {
				if !slices.ContainsFunc((Config{}).settings(), func(s setting) bool { return s.name == name }) {
					t.Errorf("%v is no setting", name)
				}
				if secretSettings[name.(string)] {
					t.Errorf("%v is a secret, want it as a file", name)
				}
			}
		}
		relay := doc["services"].(document)["relay"].(document)
		for key, want := range map[string]any{
			"read_only": true, "user": "65532:65532", "cap_drop": []any{"ALL"}, "security_opt": []any{"no-new-privileges:true"},
			"mem_limit": "256m", "restart": "unless-stopped",
		} {
			if got := relay[key]; !reflect.DeepEqual(got, want) {
				t.Errorf("%s = %v, want %v", key, got, want)
			}
		}
		grace, err := time.ParseDuration(fmt.Sprint(relay["stop_grace_period"]))
		if least := validConfig(t).ShutdownTimeout + shutdownGrace; err != nil || grace <= least {
			t.Errorf("stop_grace_period = %v (%v), not more than SHUTDOWN_TIMEOUT", grace, err)
		}
	}
}

// series are those that the relay can have: by name their labels, and of each label the values that are there
// from the start.
type series map[string]map[string][]string

func registered(t *testing.T) series {
	t.Helper()
	reg := newRegistry()
	newMetrics(reg)
	families, err := reg.Gather()
	if err != nil {
		t.Fatal(err)
	}
	all := series{"up": {}}
	for _, f := range families {
		labels := make(map[string][]string)
		for _, m := range f.GetMetric() {
			for _, l := range m.GetLabel() {
				labels[l.GetName()] = append(labels[l.GetName()], l.GetValue())
			}
		}
		all[f.GetName()] = labels
		if f.GetType().String() == "HISTOGRAM" {
			for _, suffix := range []string{"_bucket", "_count", "_sum"} {
				all[f.GetName()+suffix] = labels
			}
		}
	}
	return all
}

var (
	selector = regexp.MustCompile(`\b((?:outbox|process|go)_[a-z0-9_]+)(?:\{([^}]*)\})?`)
	matcher  = regexp.MustCompile(`(\w+)\s*(=~|!~|!=|=)\s*"([^"]*)"`)
	grouping = regexp.MustCompile(`\b(?:by|on|without)\s*\(([^)]*)\)`)
	// ofScrape are labels that Prometheus adds, or a histogram has.
	ofScrape = []string{"job", "instance", "le"}
)

// assertSeries fails the test for a query that names a series, a label or a value of it that the relay does not have.
func assertSeries(t *testing.T, what, query string, all series) {
	t.Helper()
	found := selector.FindAllStringSubmatch(query, -1)
	if len(found) == 0 && !strings.Contains(query, "up") {
		t.Errorf("%s: no series in %q", what, query)
	}
	known := slices.Clone(ofScrape)
	for _, s := range found {
		labels, ok := all[s[1]]
		if !ok {
			t.Errorf("%s: the relay has no %s", what, s[1])
		}
		known = slices.AppendSeq(known, maps.Keys(labels))
		for _, m := range matcher.FindAllStringSubmatch(s[2], -1) {
			values, ok := labels[m[1]]
			switch {
			case slices.Contains(ofScrape, m[1]):
			case !ok:
				t.Errorf("%s: %s has no label %s", what, s[1], m[1])
			case (m[2] == "=" || m[2] == "!=") && !slices.Contains(values, m[3]):
				t.Errorf("%s: %s of %s is never %q", what, m[1], s[1], m[3])
			case m[2] == "=~" && !slices.ContainsFunc(values, regexp.MustCompile("^(?:"+m[3]+")$").MatchString):
				t.Errorf("%s: no %s of %s matches %q", what, m[1], s[1], m[3])
			}
		}
	}
	for _, g := range grouping.FindAllStringSubmatch(query, -1) {
		for label := range strings.SplitSeq(g[1], ",") {
			if label = strings.TrimSpace(label); label != "" && !slices.Contains(known, label) {
				t.Errorf("%s: nothing in %q has a label %s", what, query, label)
			}
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
