# The relay's image: one static binary and the CA certificates, nothing else.
#
#   docker build --build-arg VERSION=1.2.3 --build-arg REVISION=$(git rev-parse HEAD) -t outbox-relay:1.2.3 .
#
# GO_IMAGE is any image with the Go of go.mod and CA certificates.
ARG GO_IMAGE=golang:1.26
FROM ${GO_IMAGE} AS build

# Where modules come from; empty is Go's default.
ARG GOPROXY
ARG GOFLAGS
WORKDIR /src
COPY go.mod go.sum ./
ENV CGO_ENABLED=0
# The big dependencies, and with them the standard library, are fetched and compiled here: again only
# when go.mod changes, not with each change of the sources.
RUN go build -trimpath \
      github.com/alecthomas/kong github.com/lib/pq github.com/rabbitmq/amqp091-go \
      github.com/prometheus/client_golang/prometheus/promhttp github.com/prometheus/exporter-toolkit/web
COPY . .
ARG VERSION=dev
ARG REVISION
RUN go build -trimpath -buildvcs=false \
      -ldflags "-s -w -X main.version=${VERSION} -X main.revision=${REVISION}" -o /outbox-relay .

FROM scratch
ARG VERSION=dev
ARG REVISION
LABEL org.opencontainers.image.title="outbox-relay" \
      org.opencontainers.image.description="Publishes the events of a transactional outbox in PostgreSQL to RabbitMQ" \
      org.opencontainers.image.licenses="MIT" \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.revision="${REVISION}"
COPY --from=build /etc/ssl/certs/ca-certificates.crt /etc/ssl/certs/
COPY --from=build /outbox-relay /outbox-relay
USER 65532:65532
EXPOSE 9090
# Whether it lives, not whether it is ready: an outage of a server is no reason to restart the relay.
HEALTHCHECK --interval=10s --timeout=3s --start-period=10s --retries=3 CMD ["/outbox-relay", "healthcheck"]
ENTRYPOINT ["/outbox-relay"]
