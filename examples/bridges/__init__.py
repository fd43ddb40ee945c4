"""Three bridges, exactly once, over real servers that are fetched and started; what runs is killed again and again.

bridge.py             what one bridge says of itself
alive.py              a command that is killed at its crash points, and started again
run.py                one bridge: servers, a sender, receivers, the pipeline, kills, and what arrived
results.py            the table and the JSON
pulsar_delta.py       Pulsar -> Spark -> Delta Lake             pulsar-delta.yaml
rabbitmq_postgres.py  RabbitMQ -> receivers -> Spark -> PostgreSQL   rabbitmq-postgres.yaml
rocketmq_kafka.py     RocketMQ -> receivers -> Spark -> Kafka        rocketmq-kafka.yaml
__main__.py           all of it, in order

The YAML files are pipelines to copy: a run puts its own addresses and folders into them, and changes nothing else
but the size of the JVM.
"""
