package main

import (
	"os"
	"strings"
	"testing"

	"outbox-relay/internal/migrate"
	"outbox-relay/internal/testenv"
)

func TestMain(m *testing.M) {
	if os.Getenv("RUN_AS_RELAY") != "" { // a child of TestSignals: signals are the relay's
		os.Exit(m.Run())
	}
	testenv.Main(m)
}

// migrated makes the outbox in the database at dsn.
func migrated(t *testing.T, dsn string) {
	t.Helper()
	var out strings.Builder
	if err := migrate.Run(t.Context(), dsn, &out); err != nil {
		t.Fatalf("migrate: %v\n%s", err, out.String())
	}
}
