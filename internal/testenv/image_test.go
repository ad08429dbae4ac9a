package testenv

import (
	"net/http"
	"testing"
	"time"
)

func TestImageRunsReadOnlyAsNobody(t *testing.T) {
	t.Parallel()
	dsn, amqpURL := Database(t), Vhost(t)
	env := []string{"DATABASE_URL=" + dsn, "AMQP_URL=" + amqpURL}
	if code, stdout, stderr := Command(t, env, "migrate"); code != 0 {
		t.Fatalf("migrate: exit code %d\n%s%s", code, stdout, stderr)
	}
	q := Consume(t, amqpURL, "outbox")
	relay := RunImage(t, 0, env...)
	if got, want := relay.User(), "65532:65532"; got != want {
		t.Errorf("user = %q, want %s", got, want)
	}
	Eventually(t, 30*time.Second, "the relay is ready", func() bool {
		status, _, err := get("http://" + relay.HTTPAddr + "/readyz")
		return err == nil && status == http.StatusOK
	})
	Exec(t, dsn, `INSERT INTO outbox_events (aggregate_type, aggregate_id, event_type, payload)
		VALUES ('order', '1', 'order.placed', '{"from":"the image"}')`)
	if got := string(q.Next(t, 10*time.Second).Body); got != `{"from": "the image"}` {
		t.Errorf("body = %s", got)
	}
	Eventually(t, 30*time.Second, "the health check passes", func() bool { return relay.Health(t) == "healthy" })
	if got := relay.Stop(t); got != 0 {
		t.Errorf("exit code = %d, want 0", got)
	}
}
