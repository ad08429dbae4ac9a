package main

import (
	"bytes"
	"errors"
	"log/slog"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"
)

// logged returns the lines in b without their time, and empties it.
func logged(b *bytes.Buffer) []string {
	var lines []string
	for line := range strings.Lines(b.String()) {
		_, rest, _ := strings.Cut(strings.TrimSpace(line), " ")
		lines = append(lines, rest)
	}
	b.Reset()
	return lines
}

func TestRepeatLog(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var b bytes.Buffer
		r := repeatLog{log: slog.New(slog.NewTextHandler(&b, nil)), what: "connect"}
		expect := func(why string, want ...string) {
			t.Helper()
			if diff := cmp.Diff(want, logged(&b)); diff != "" {
				t.Errorf("%s: %s", why, diff)
			}
		}

		r.OK()
		expect("a success without failures is not news")

		r.Failed(errors.New("refused"), keyServer, "a")
		expect("the first failure", `level=WARN msg="connect: failing" err=refused server=a`)

		for range 59 {
			time.Sleep(time.Second)
			r.Failed(errors.New("refused"))
		}
		expect("the same failure again")

		time.Sleep(time.Second)
		r.Failed(errors.New("refused"))
		expect("a minute later", `level=WARN msg="connect: failing" err=refused count=61 duration=1m0s`)

		r.Failed(errors.New("timeout"))
		expect("another failure", `level=WARN msg="connect: failing" err=timeout count=62 duration=1m0s`)

		time.Sleep(time.Second)
		r.OK()
		expect("success", `level=INFO msg="connect: works again" count=62 duration=1m1s`)

		r.Failed(errors.New("timeout"))
		expect("failing anew", `level=WARN msg="connect: failing" err=timeout`)

		r.Failed(errors.New("read tcp 10.0.0.1:40001->10.0.0.2:5672: reset"))
		r.Failed(errors.New("read tcp 10.0.0.1:40002->10.0.0.2:5672: reset"))
		if got := len(logged(&b)); got != 1 {
			t.Errorf("errors that differ in the local port: %d lines, want 1", got)
		}
	})
}

func TestLoggerWritesDurationsToBeRead(t *testing.T) {
	for format, want := range map[string]string{"json": `"d":"1m30s"`, "text": "d=1m30s"} {
		var b bytes.Buffer
		log, err := newLogger(&b, "info", format)
		if err != nil {
			t.Fatal(err)
		}
		log.Debug("unseen")
		log.Info("seen", "d", 90*time.Second)
		if got := b.String(); !strings.Contains(got, want) || strings.Contains(got, "unseen") {
			t.Errorf("%s: %s", format, got)
		}
	}
}
