package testenv

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"

	"github.com/ory/dockertest/v3/docker"
)

// RabbitMQCluster starts a cluster of n nodes, any of which the test may stop or kill. It is removed at
// the test's end.
func RabbitMQCluster(t testing.TB, n int) []*RabbitMQ {
	t.Helper()
	needDocker(t, "TEST_AMQP_URL")
	image := imageOf(t, "RABBITMQ_IMAGE")
	network := newNetwork(t)

	nodes := make([]*RabbitMQ, n)
	names := make([]string, n)
	var conf strings.Builder
	conf.WriteString("cluster_formation.peer_discovery_backend = classic_config\n")
	for i := range names {
		names[i] = containerName("rabbitmq") // by which they find each other
		fmt.Fprintf(&conf, "cluster_formation.classic_config.nodes.%d = rabbit@%s\n", i+1, names[i])
	}
	file := filepath.Join(t.TempDir(), "cluster.conf")
	if err := os.WriteFile(file, []byte(conf.String()), 0o644); err != nil {
		t.Fatal(err)
	}
	if err := os.Chmod(filepath.Dir(file), 0o755); err != nil { // the server's user is another
		t.Fatal(err)
	}

	var starting sync.WaitGroup
	for i := range nodes {
		starting.Go(func() {
			s := rabbitmqSpec(image)
			s.name, s.network = names[i], network
			s.env = append(s.env, "RABBITMQ_NODENAME=rabbit@"+names[i], "RABBITMQ_ERLANG_COOKIE=outbox-relay-test")
			s.mounts = []string{file + ":/etc/rabbitmq/conf.d/50-cluster.conf:ro"}
			c, err := runContainer(context.Background(), s)
			if err != nil {
				t.Errorf("node %d: %v", i+1, err)
				return
			}
			nodes[i] = &RabbitMQ{Container: c, URL: rabbitmqURL(c)}
		})
	}
	starting.Wait()
	t.Cleanup(func() {
		for _, node := range nodes {
			if node != nil {
				report(node.purge())
			}
		}
	})
	if t.Failed() {
		t.FailNow()
	}
	Eventually(t, startTimeout, "the nodes are a cluster", func() bool {
		var members []struct{ Running bool }
		nodes[0].API(t, "GET", "/nodes", nil, &members)
		return len(members) == n
	})
	return nodes
}

// newNetwork makes a network in which containers find each other by name. It is removed at the test's end.
func newNetwork(t testing.TB) string {
	t.Helper()
	pool, err := engine()
	if err != nil {
		t.Fatal(err)
	}
	network, err := pool.Client.CreateNetwork(docker.CreateNetworkOptions{
		Name: containerName("network"), Labels: map[string]string{ownerLabel: runID()},
	})
	if err != nil {
		t.Fatalf("make a network: %v", err)
	}
	t.Cleanup(func() { report(pool.Client.RemoveNetwork(network.ID)) })
	return network.Name
}
