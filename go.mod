module outbox-relay

go 1.26
