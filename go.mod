module outbox-relay

go 1.26

require github.com/rabbitmq/amqp091-go v1.16.0

require github.com/lib/pq v1.12.3
