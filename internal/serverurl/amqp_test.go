package serverurl

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"outbox-relay/internal/testenv"

	"github.com/google/go-cmp/cmp"
)

func TestSplitAMQPURLs(t *testing.T) {
	for list, want := range map[string][]string{
		"amqp://a":                                {"amqp://a"},
		"amqp://a,amqps://b, amqp://c\n":          {"amqp://a", "amqps://b", "amqp://c"},
		"amqp://u:p,w@a,amqp://u:p,w@b":           {"amqp://u:p,w@a", "amqp://u:p,w@b"},
		"amqp://a,,amqp://b":                      {"amqp://a,", "amqp://b"},
		"amqp://u:p@a/v?heartbeat=5,amqp://u:p@b": {"amqp://u:p@a/v?heartbeat=5", "amqp://u:p@b"},
		"": {""},
	} {
		if diff := cmp.Diff(want, SplitAMQP(list)); diff != "" {
			t.Errorf("%q: %s", list, diff)
		}
	}
}

func TestCheckAMQPURL(t *testing.T) {
	const scheme = "the scheme must be amqp:// or amqps://"
	tests := []struct{ name, url, want string }{
		{"the least", "amqp://mq", ""},
		{"everything", "amqps://u:hunter2@mq:5671/v%2Fw?heartbeat=5&connection_timeout=3000&channel_max=9&auth_mechanism=plain&server_name_indication=mq", ""},
		{"no host", "amqp://", ""},
		{"IPv6", "amqp://u:hunter2@[::1]:5672", ""},
		{"nothing", "", scheme},
		{"a bare host", "mq:5672", scheme},
		{"HTTP", "http://u:hunter2@mq", scheme},
		{"a capital scheme", "AMQP://u:hunter2@mq", scheme},
		{"a comma at the end", "amqp://u:hunter2@mq/v,", "ends with a comma, and no URL follows: remove it, or write %2C if it belongs to the virtual host"},
		{"a space", "amqp://u:p@mq/hunter2 x", "has a space in it; write it as %20"},
		{"a space in the password", "amqp://u:hunter2 x@mq", "not a URL (invalid userinfo)" + encodeHint},
		{"a line end", "amqp://u:hunter2\n@mq", "not a URL (invalid control character)" + encodeHint},
		{"/ in the password", "amqp://u:x/hunter2@mq", "not a URL (invalid port)" + encodeHint},
		{"a number and / in the password", "amqp://u:12/hunter2@mq", "has an @ after the host" + encodeHint},
		{"? in the password", "amqp://u:12?hunter2@mq", "has an @ after the host" + encodeHint},
		{"# in the password", "amqp://u:12#hunter2@mq", "has a # in it" + encodeHint},
		{"% in the password", "amqp://u:hunter2%@mq", "not a URL (invalid URL escape)" + encodeHint},
		{"a port that is none", "amqp://u:p@mq:hunter2", "not a URL (invalid port)" + encodeHint},
		{"a port too far", "amqp://u:hunter2@mq:99999999999", "not a URL that amqp091-go understands"},
		{"a heartbeat that is none", "amqp://u:hunter2@mq?heartbeat=hunter2", "heartbeat is not an uint16"},
		{"a timeout with a unit", "amqp://u:hunter2@mq?connection_timeout=5s", "connection_timeout is not an integer"},
		{"a slip in a TLS setting", "amqps://u:hunter2@mq?cacert=/ca.pem", `parameter "cacert" would be ignored; known are `},
		{"verification switched off elsewhere", "amqps://u:hunter2@mq?verify=verify_none", `parameter "verify" would be ignored; known are `},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			faults := CheckAMQP(tt.url)
			switch {
			case tt.want == "" && len(faults) > 0:
				t.Error(faults)
			case tt.want != "" && (len(faults) != 1 || !strings.HasPrefix(faults[0], tt.want)):
				t.Errorf("faults = %q, want %q", faults, tt.want)
			}
			said := strings.Join(faults, "") + RedactAMQP(tt.url)
			if strings.Contains(said, "hunter2") {
				t.Errorf("a password in %s", said)
			}
		})
	}
}

func TestCheckTLSFiles(t *testing.T) {
	cert, key := testenv.Certificate(t)
	noPEM := filepath.Join(t.TempDir(), "none.pem")
	if err := os.WriteFile(noPEM, []byte("nothing"), 0o600); err != nil {
		t.Fatal(err)
	}
	tests := []struct {
		name, query string
		want        []string
	}{
		{"none", "", nil},
		{"all", "cacertfile=" + cert + "&certfile=" + cert + "&keyfile=" + key, nil},
		{"an absent CA", "cacertfile=/nonexistent", []string{"cacertfile: open /nonexistent: no such file or directory"}},
		{"a CA that holds no certificate", "cacertfile=" + noPEM, []string{"cacertfile: no certificate in PEM form in " + noPEM}},
		{"a certificate without key", "certfile=" + cert, []string{"certfile and keyfile belong together, one is missing"}},
		{"a key that is none", "certfile=" + cert + "&keyfile=" + noPEM, []string{"certfile and keyfile: tls: failed to find any PEM data in key input"}},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			if diff := cmp.Diff(tt.want, CheckTLSFiles("amqps://mq?"+tt.query)); diff != "" {
				t.Error(diff)
			}
			if got := CheckTLSFiles("amqp://mq?" + tt.query); got != nil {
				t.Errorf("without TLS: %q", got)
			}
		})
	}
}

func TestRedactedAMQPURL(t *testing.T) {
	for url, want := range map[string]string{
		"amqp://u:hunter2@mq/v":   "amqp://u@mq:5672/v",
		"amqps://u:hunter2@mq":    "amqps://u@mq:5671/",
		"amqp://mq/%2Fa":          "amqp://guest@mq:5672/a",
		"amqp://u:hunter2@[::1]":  "amqp://u@[::1]:5672/",
		"amqp://u:12/hunter2@mq/": unreadable,
	} {
		if got := RedactAMQP(url); got != want {
			t.Errorf("redacted(%s) = %s, want %s", url, got, want)
		}
	}
}

func FuzzCheckAMQPURL(f *testing.F) {
	f.Add("amqp://u:hunter2@mq/v?heartbeat=5")
	f.Add("amqps://mq,amqp://b")
	f.Add("amqp://u:12/hunter2@mq")
	f.Fuzz(func(t *testing.T, list string) {
		for _, u := range SplitAMQP(list) {
			fine := len(CheckAMQP(u)) == 0
			if got := RedactAMQP(u); fine == (got == unreadable) {
				t.Errorf("%q: fine is %v, shown as %s", u, fine, got)
			}
		}
	})
}
