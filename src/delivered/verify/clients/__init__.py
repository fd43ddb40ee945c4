"""Clients of the judge's own: they share no code with the product's connectors, so that one mistake is not made twice.

base.py      what a system must offer to be written to and read by the judge
kafka.py     topics, with confluent-kafka; read-committed
sqlite.py    tables, with the standard library
postgres.py  tables, with psycopg
delta.py     tables, by their log and with deltalake
files.py     folders, with pyarrow
folders.py   what the last two share: which file came first
log.py       logs; read with deltalake, written as every producer writes them
messages.py  sinks that are messages of a broker: rabbitmq.py, activemq.py, pulsar.py, rocketmq.py
queue.py     sources that forget: rabbitmq_feed.py (streams, too), activemq_feed.py, rocketmq_feed.py
pulsar_feed.py  a source that keeps its messages
drains.py, feeds.py  which client reads which sink, and fills which source
"""
