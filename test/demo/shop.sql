-- What the shop needs: its logins and its tables. For psql, after sql/roles.sql and
-- sql/consumer.sql; may be run again. The passwords come from the environment.
\getenv relay_password RELAY_DB_PASSWORD
\getenv shop_password SHOP_DB_PASSWORD

SELECT format('CREATE ROLE %I LOGIN', name) FROM unnest(ARRAY['relay', 'shop']) AS name
WHERE NOT EXISTS (SELECT FROM pg_roles WHERE rolname = name) \gexec
ALTER ROLE relay PASSWORD :'relay_password';
ALTER ROLE shop PASSWORD :'shop_password';
GRANT outbox_relay TO relay;
GRANT outbox_app TO shop;
GRANT pg_read_all_stats TO relay; -- optional: `outbox-relay doctor` then sees old sessions of others

CREATE TABLE IF NOT EXISTS orders (
    id      BIGINT GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    version INT    NOT NULL DEFAULT 1,
    cents   BIGINT NOT NULL
);

-- The consumer's effect. It stands for mails, stock, another service's data.
CREATE TABLE IF NOT EXISTS order_counts (
    event_type TEXT   PRIMARY KEY,
    events     BIGINT NOT NULL
);

GRANT SELECT, INSERT, UPDATE ON orders, order_counts TO shop;
GRANT SELECT, INSERT ON processed_events TO shop;
