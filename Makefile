# The version of the linter; it is fetched and built by `go run`.
GOLANGCI_LINT := github.com/golangci/golangci-lint/v2/cmd/golangci-lint@v2.15.0

# Stamped into the binary and the image.
VERSION  ?= dev
REVISION ?= $(shell git rev-parse --short HEAD 2>/dev/null)

# The race detector needs a C compiler.
RACE := $(if $(filter 1,$(shell go env CGO_ENABLED)),-race)
# Go would take the results of an earlier run for those of today's servers: hence -count=1 below.
# More flags for go test: make test TESTFLAGS='-short -run TestRelay'
TESTFLAGS ?=

.PHONY: help
help: ## print the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-10s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

.PHONY: build
build: ## build bin/outbox-relay
	CGO_ENABLED=0 go build -trimpath -ldflags '-X main.version=$(VERSION)' -o bin/outbox-relay .

.PHONY: test
test: ## run all tests, with servers in Docker or those of TEST_DATABASE_URL and TEST_AMQP_URL
	@$(if $(RACE),,echo 'test: no C compiler, so without the race detector' >&2;) \
	if images=$$(test/images/provide postgres rabbitmq prometheus relay); then export $$images; \
	else echo 'test: no images; the tests will say what they miss' >&2; fi; \
	set -x; go test $(RACE) -count=1 -timeout 40m $(TESTFLAGS) ./...

# How long make chaos runs, and the seed of a run to repeat.
CHAOS_MINUTES ?= 30
CHAOS_SEED    ?=

.PHONY: chaos
chaos: ## break servers, links and relays at random for CHAOS_MINUTES=30; CHAOS_SEED= repeats a run
	@images=$$(test/images/provide postgres rabbitmq) && export $$images && \
	export CHAOS_MINUTES='$(CHAOS_MINUTES)' CHAOS_SEED='$(CHAOS_SEED)' && set -x && \
	go test $(RACE) -v -count 1 -timeout 0 -run '^TestChaos$$' ./test/chaos

# Flags of make bench; BENCH_FLAGS=-h lists them.
BENCH_FLAGS ?=

.PHONY: bench
bench: ## measure the relay beside its baselines, with servers as in make test; BENCH_FLAGS='-only drain -runs 5'
	@images=$$(test/images/provide postgres rabbitmq) && export $$images && set -x && cd test/bench && \
	CGO_ENABLED=0 go test -count=1 -timeout 0 -run '^TestBench$$' -args -full $(BENCH_FLAGS)

.PHONY: lint
lint: ## run golangci-lint
	go run $(GOLANGCI_LINT) run ./...

.PHONY: fmt
fmt: ## format the sources
	go run $(GOLANGCI_LINT) fmt ./...

.PHONY: image
image: ## build the relay's image, outbox-relay:dev
	@VERSION='$(VERSION)' REVISION='$(REVISION)' test/images/provide relay

.PHONY: demo
demo: ## see events flow: a sample shop, PostgreSQL, the relay and RabbitMQ, for half a minute
	@VERSION='$(VERSION)' REVISION='$(REVISION)' test/demo/run

.PHONY: down
down: ## remove what a demo left running
	@test/demo/run down
