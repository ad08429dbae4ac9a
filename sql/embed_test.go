package sqlfiles

import (
	"fmt"
	"regexp"
	"slices"
	"strings"
	"testing"
)

func TestSchemaHasTheConstantsOfThisPackage(t *testing.T) {
	for _, want := range []string{
		fmt.Sprintf("pg_try_advisory_xact_lock_shared(%d, TG_RELID::", DoorbellLockClass),
		fmt.Sprintf("pg_notify('%s', TG_RELID::", Channel),
	} {
		if !strings.Contains(TriggerFunction(), want) {
			t.Errorf("schema.sql's trigger function lacks %q", want)
		}
	}
}

func TestLockClassesDiffer(t *testing.T) {
	classes := []int32{
		DoorbellLockClass, WorkLockClass, KeeperLockClass, RetentionLockClass, MigrateLockClass,
		RelayFlagClass, PausedFlagClass, ListenFlagClass, BrokerFlagClass,
	}
	slices.Sort(classes)
	if len(slices.Compact(slices.Clone(classes))) != len(classes) {
		t.Error("two locks have the same class")
	}
}

func TestIndexes(t *testing.T) {
	var names []string
	for _, index := range Indexes() {
		names = append(names, index.Name)
		if !strings.HasPrefix(index.Create, "CREATE INDEX "+index.Name+" ON outbox_events (") {
			t.Errorf("%s: %q", index.Name, index.Create)
		}
	}
	if want := []string{"outbox_events_fresh", "outbox_events_retry", "outbox_events_blocking"}; !slices.Equal(names, want) {
		t.Errorf("indexes = %q, want %q", names, want)
	}
}

func TestSectionsHoldStatements(t *testing.T) {
	mark := regexp.MustCompile(`(?m)^-- section: (.*)$`)
	for _, text := range []string{Schema, migrate} {
		seen := map[string]bool{}
		for _, found := range mark.FindAllStringSubmatch(text, -1) {
			name := found[1]
			if seen[name] {
				t.Errorf("two sections are called %q", name)
			}
			seen[name] = true
			if s := section(text, name); !regexp.MustCompile(`(?m)^[A-Z]+ `).MatchString(s) {
				t.Errorf("section %q has no statement: %q", name, s)
			}
		}
	}
}
