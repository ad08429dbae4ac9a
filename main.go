// Command outbox-relay publishes the events of a transactional outbox in PostgreSQL to RabbitMQ.
package main

func main() {}
