package main

import (
	"os"
	"regexp"
	"slices"
	"testing"

	"github.com/google/go-cmp/cmp"
)

// linesOf returns what the expression's group matches in a file, sorted.
func linesOf(t *testing.T, file, expression string) (found []string) {
	t.Helper()
	text, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	for _, m := range regexp.MustCompile(expression).FindAllStringSubmatch(string(text), -1) {
		found = append(found, m[1])
	}
	slices.Sort(found)
	return found
}

func TestEveryAlertHasAPageInTheRunbook(t *testing.T) {
	alerts := linesOf(t, "deploy/prometheus/alerts.yml", `(?m)^ *- alert: (\w+)$`)
	pages := linesOf(t, "docs/runbook.md", `(?m)^## (\w+)$`)
	if diff := cmp.Diff(alerts, pages); diff != "" {
		t.Errorf("the runbook differs (-alerts +pages):\n%s", diff)
	}
}
