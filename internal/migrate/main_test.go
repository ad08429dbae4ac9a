package migrate

import (
	"testing"

	"outbox-relay/internal/testenv"
)

func TestMain(m *testing.M) { testenv.Main(m) }
