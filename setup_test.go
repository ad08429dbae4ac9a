package main

import (
	"os"
	"testing"

	"outbox-relay/internal/testenv"
)

func TestMain(m *testing.M) {
	if os.Getenv("RUN_AS_RELAY") != "" { // a child of TestSignals: signals are the relay's
		os.Exit(m.Run())
	}
	testenv.Main(m)
}
