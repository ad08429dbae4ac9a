package main

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

func TestSecretsAreReadAgainAtEachCall(t *testing.T) {
	file := filepath.Join(t.TempDir(), "amqp")
	cfg := Config{AMQPURLFile: file}
	for _, want := range []string{"amqp://u:first@mq", "amqp://u:second@mq"} {
		if err := os.WriteFile(file, []byte(want+"\r\n"), 0o600); err != nil {
			t.Fatal(err)
		}
		got, err := cfg.amqpURLs()
		if err != nil {
			t.Fatal(err)
		}
		if diff := cmp.Diff([]string{want}, got); diff != "" {
			t.Error(diff)
		}
	}
	if err := os.WriteFile(file, make([]byte, maxSecretBytes+1), 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := cfg.amqpURLs(); err == nil || !strings.Contains(err.Error(), "over 65536 bytes") {
		t.Errorf("a file without end: %v", err)
	}
}
