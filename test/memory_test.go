package test

import (
	"testing"

	"outbox-relay/internal/testenv"
)

// The relay has 256 MiB, and 300 MiB wait for it: what is in hand is bounded by its real size, also
// where the table holds it compressed to a hundredth.
func TestMemoryIsBoundedByBatchBytes(t *testing.T) {
	const rows, size = 60, 5 << 20
	for name, payload := range map[string]string{
		"random":       "(SELECT string_agg(md5(i::text), '') FROM generate_series(1, $2::int / 32) i)",
		"compressible": "repeat('x', $2::int)",
	} {
		t.Run(name, func(t *testing.T) {
			o := newOutbox(t)
			if name == "random" { // compressing it is in vain and takes long
				testenv.Exec(t, o.dsn, "ALTER TABLE outbox_events ALTER payload SET STORAGE EXTERNAL")
			}
			testenv.Exec(t, o.dsn, `WITH payload AS MATERIALIZED (SELECT to_jsonb(`+payload+`) AS json)
				INSERT INTO outbox_events (aggregate_type, aggregate_id, event_type, payload)
				SELECT 'order', i::text, 'order.created', json FROM payload, generate_series(1, $1::int) i`, rows, size)
			q := testenv.ConsumeFrom(t, o.amqpURL, testenv.Binding{Exchange: exchange, Hold: true})
			relay := testenv.RunImage(t, 256<<20, "DATABASE_URL="+o.dsn, "AMQP_URL="+o.amqpURL)
			o.waitRowCount(t, "processed_at IS NOT NULL", rows)
			inspected, err := o.channel(t).QueueDeclarePassive(q.Name, true, false, false, false, nil)
			if err != nil {
				t.Fatal(err)
			}
			if inspected.Messages != rows {
				t.Errorf("%d messages, want %d", inspected.Messages, rows)
			}
			if code := relay.Stop(t); code != 0 { // 137 after the kernel has ended it
				t.Errorf("exit code %d, want 0", code)
			}
		})
	}
}
