"""A Kafka client over Arrow columns: connections, record batches, fetch, produce, transactions. Knows no connector."""
