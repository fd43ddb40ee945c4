"""Pipeline files and options that nobody can run, by name: each is refused with a message that stays as it is."""

from __future__ import annotations

from collections.abc import Iterator

HEAD = "pipeline: orders\nguarantee: exactly_once\ncheckpoint: c\n"
SOURCE = "source: {format: log, path: /data/log}\n"
SINK = "sinks: [{format: sqlite, path: /data/o.db, table: orders}]\n"
GOOD = HEAD + SOURCE + SINK

FILES = {
    "empty": "",
    "a comment": "# nothing\n",
    "a list": "- pipeline\n",
    "a word": "pipeline\n",
    "a number": "7\n",
    "not YAML": "pipeline: [a\n",
    "an early end": '{"pipeline":\n',
    "no blank after a colon": GOOD.replace("guarantee: ", "guarantee:"),
    "a line too deep": GOOD.replace("checkpoint", "  checkpoint"),
    "no blank after a dash": HEAD + SOURCE + "sinks:\n  -format: sqlite\n   path: p\n",
    "an open quote": GOOD.replace("/data/log", "'/data/log"),
    "a backslash": GOOD.replace("/data/log", '"C:\\data"'),
    "an at sign": GOOD.replace("/data/log", "@data"),
    "a list indented twice": HEAD + SOURCE + "sinks:\n- format: sqlite\n path: p\n  table: t\n",
    "typographic quotes": GOOD.replace("/data/log", "\u201c/data/log\u201d"),
    "a tab": "pipeline: a\n\tguarantee: b\n",
    "two documents": GOOD + "---\n" + GOOD,
    "a control character": "pipeline: a\x01b\n",
    "a python tag": "pipeline: !!python/object/apply:os.system [ls]\n",
    "a duplicate key": GOOD + "pipeline: again\n",
    "an alias of nothing": "pipeline: *a\n",
    "a cycle": "pipeline: &a [*a]\n",
    "too deep": "pipeline: " + "[" * 60 + "]" * 60 + "\n",
    "aliases of aliases": "a: &a [x,x,x,x,x,x,x,x,x,x]\n"
    + "".join(f"{chr(98 + i)}: &{chr(98 + i)} [{','.join(['*' + chr(97 + i)] * 10)}]\n" for i in range(8)),
    "5,000 sinks": HEAD + SOURCE + "sinks:\n" + "  - {format: sqlite, path: p, table: t}\n" * 5_000,
    "no pipeline": "guarantee: exactly_once\n",
    "no guarantee": "pipeline: p\ncheckpoint: c\n" + SOURCE + SINK,
    "no checkpoint": "pipeline: p\nguarantee: exactly_once\n" + SOURCE + SINK,
    "no source": HEAD + SINK,
    "no sinks": HEAD + SOURCE,
    "empty sinks": HEAD + SOURCE + "sinks: []\n",
    "source and sources": GOOD + "sources: {a: {format: log, path: x}}\n",
    "sources without one": HEAD + "sources: {}\n" + SINK,
    "an unknown guarantee": GOOD.replace("exactly_once", "twice"),
    "a guarantee in words": GOOD.replace("exactly_once", "exactly once"),
    "an unknown key": GOOD + "chekpoint: c\n",
    "a key of another level": GOOD + "sql: SELECT 1\n",
    "a key of the top": GOOD + "dedup: {by: [id], within: 1 hour, trigger: 1 s}\n",
    "a key for another": GOOD.replace("sinks:", "sink:"),
    "an unknown key of notify": GOOD + "notify: {webhok: 'env:URL'}\n",
    "a nested unknown key": GOOD + "dedup: {by: [id], within: 1 hour, latest: drop}\n",
    "a number as name": GOOD.replace("orders\n", "7\n", 1),
    "a name with a slash": GOOD.replace("orders\n", "a/b\n", 1),
    "a long name": GOOD.replace("orders\n", "o" * 100 + "\n", 1),
    "a name with an accent": GOOD.replace("orders\n", "éclair\n", 1),
    "an empty checkpoint": GOOD.replace("checkpoint: c", "checkpoint: ''"),
    "a list as checkpoint": GOOD.replace("checkpoint: c", "checkpoint: [c]"),
    "a password in checkpoint": GOOD.replace("checkpoint: c", "checkpoint: s3://key:hunter2@bucket/c"),
    "one slash in checkpoint": GOOD.replace("checkpoint: c", "checkpoint: s3:/bucket/c"),
    "a variable as checkpoint": GOOD.replace("checkpoint: c", "checkpoint: env:PLACE"),
    "an unknown master": GOOD + "master: local[two]\n",
    "a password in master": GOOD + "master: spark://me:hunter2@host:7077\n",
    "a text as source": HEAD + "source: kafka\n" + SINK,
    "a source without format": HEAD + "source: {path: x}\n" + SINK,
    "an unknown source": HEAD + "source: {format: kafak}\n" + SINK,
    "a number as format": HEAD + "source: {format: 7}\n" + SINK,
    "a sink as source": HEAD + "source: {format: sqlite, path: p, table: t}\n" + SINK,
    "a mapping as sinks": HEAD + SOURCE + "sinks: {format: sqlite, password: hunter2}\n",
    "a text in sinks": HEAD + SOURCE + "sinks: [sqlite]\n",
    "a list in sinks": HEAD + SOURCE + "sinks: [[{format: sqlite, password: hunter2}]]\n",
    "an unknown sink": HEAD + SOURCE + "sinks: [{format: postgress, url: u, dbtable: t}]\n",
    "a format of Spark's as sink": HEAD + SOURCE + "sinks: [{format: csv, path: p}]\n",
    "another tool's name": HEAD + SOURCE + "sinks: [{format: mariadb, url: u, dbtable: t}]\n",
    "a variable as path": GOOD.replace("/data/log", "env:PLACE"),
    "one slash in a path": GOOD.replace("/data/log", "s3a:/bucket/log"),
    "a source as sink": HEAD + SOURCE + "sinks: [{format: rabbitmq_stream, url: 'rabbitmq-stream://h', streams: s}]\n",
    "Spark's own sink": HEAD + SOURCE + "sinks: [{format: 'spark:kafka', topic: t}]\n",
    "grouped options": HEAD + SOURCE + "sinks: [{format: sqlite, options: {path: p, table: t}}]\n",
    "a list as option": HEAD + SOURCE + "sinks: [{format: sqlite, path: [a, b], table: t}]\n",
    "null as option": HEAD + SOURCE + "sinks: [{format: sqlite, path: null, table: t}]\n",
    "a date as option": HEAD + SOURCE + "sinks: [{format: sqlite, path: !!timestamp 2026-01-01, table: t}]\n",
    "a bad sink name": HEAD + SOURCE + "sinks: [{format: sqlite, path: p, table: t, name: 'a b'}]\n",
    "two sinks of one name": HEAD + SOURCE + "sinks: [" + "{format: sqlite, path: p, table: t}, " * 2 + "]\n",
    "select as text": HEAD + SOURCE + "sinks: [{format: sqlite, path: p, table: t, select: id}]\n",
    "where as a list": HEAD + SOURCE + "sinks: [{format: sqlite, path: p, table: t, where: [a]}]\n",
    "an unknown audit key": HEAD + SOURCE + "sinks: [{format: sqlite, path: p, table: t, audit: {ids: a}}]\n",
    "a transform of two kinds": GOOD + "transform: {sql: SELECT 1, python: 'a:b'}\n",
    "SQL with a comma, not quoted": GOOD + "transform: {sql: SELECT key, value FROM source}\n",
    "a transform of none": GOOD + "transform: {}\n",
    "a transform as text": GOOD + "transform: SELECT 1\n",
    "a python transform without module": GOOD + "transform: {python: clean}\n",
    "a python transform with a suffix": GOOD + "transform: {python: 'clean.py:clean'}\n",
    "a python transform that is not there": GOOD + "transform: {python: 'no_such_module:clean'}\n",
    "a trigger in words": GOOD + "trigger: sometimes\n",
    "a trigger without unit": GOOD + "trigger: 10\n",
    "a trigger of two": GOOD + "trigger: {processing_time: 1 s, continuous: 1 s}\n",
    "a trigger with a secret": GOOD + "trigger: {password: hunter2}\n",
    "batch_s_max as text": GOOD + "batch_s_max: long\n",
    "batch_s_max below 0": GOOD + "batch_s_max: -1\n",
    "an output mode": GOOD + "output_mode: replace\n",
    "new_checkpoint: yes": GOOD + "new_checkpoint: yes\n",
    "on_bad_row": GOOD + "on_bad_row: ignore\n",
    "dead letters without sink": GOOD + "on_bad_row: dead_letter\n",
    "lineage as text": GOOD + "lineage: perhaps\n",
    "a reference inside": GOOD.replace("/data/log", "/data/${env:PLACE}"),
    "a variable as a shell writes it": GOOD.replace("/data/log", "$PLACE"),
    "a reference to nothing": GOOD.replace("/data/log", "${vault:PLACE}"),
    "dedup without by": GOOD + "dedup: {within: 1 hour}\n",
    "dedup by nothing": GOOD + "dedup: {by: [], within: 1 hour}\n",
    "dedup in words": GOOD + "dedup: {by: [id], within: soon}\n",
    "conf as a list": GOOD + "spark: [a]\n",
}
"""By what is wrong: the text of a pipeline file."""

_KAFKA = {"kafka.bootstrap.servers": "h:9092"}
_RECEIVED = {"log": "/data/log"}
_LEDGER = {"ledger": "/data/ledger.db"}

_OPTIONS: list[tuple[str, str, dict[str, str], dict[str, str]]] = [
    ("kafka", "source", {**_KAFKA, "subscribe": "t"}, option)
    for option in (
        {"kafka.security.protocol": "TLS"},
        {"kafka.security.protocol": "SASL_SLL"},
        {"kafka.ssl.endpoint.identification.algorithm": "off"},
        {"kafka.enable.ssl.certificate.verification": "no"},
        {"kafka.sasl.mechanism": "SCRAM-SHA-265"},
        {"startingOffsets": "erliest"},
        {"startingOffsets": '{"t": {"0": "x"}}'},
        {"startingOffsets": "{"},
        {"startingTimestamp": "yesterday"},
        {"maxOffsetsPerTrigger": "0"},
        {"maxOffsetsPerTrigger": "1e3"},
        {"minPartitions": "-1"},
        {"failOnDataLoss": "maybe"},
        {"subscribePattern": "["},
        {"assign": "t"},
        {"subscribe": ""},
        {"key.format": "xml"},
        {"value.format": "avro"},
        {"value.format": "avro", "schema.registry.url": "ftp://h"},
        {"value.format": "avro", "schema.registry.url": "http://me:hunter2@h:8081"},
        {"topics": "t"},
        {"client": "java"},
        {"schema.registry.proxy": "http://me:hunter2@h"},
    )
]
_OPTIONS += [
    ("kafka", "sink", {**_KAFKA, "topic": "t"}, option)
    for option in (
        {"kafka.enable.idempotence": "false"},
        {"kafka.transactional.id": "mine"},
        {"topic": "a b"},
        {"topic": "__consumer_offsets"},
        {"topic": "__delivered_orders"},
        {"compression": "rar"},
        {"transactionTimeout": "0"},
        {"ledgerTopic": "orders/ledger"},
        {"ledgerReplicationFactor": "none"},
        {"messageIdColumns": ","},
        {"subscribe": "t"},
    )
]
_OPTIONS += [
    ("postgres", "sink", {"url": "postgresql://me@h/d", "dbtable": "orders"}, option)
    for option in (
        {"url": "postgresql://me:hunter2@h/d"},
        {"url": "postgresql://me@h/d?password=hunter2"},
        {"url": "mysql://h/d"},
        {"url": "h:5432"},
        {"dbtable": "a.b.c"},
        {"dbtable": "orders; DROP TABLE x"},
        {"mode": "upsert"},
        {"mode": "merge"},
        {"mechanism": "xa"},
        {"keyColumns": "id"},
        {"lockTimeout": "-1"},
        {"onConflict": "replace"},
        {"tabel": "t"},
    )
]
_OPTIONS += [
    ("mysql", "sink", {"url": "mysql://me@h/d", "dbtable": "orders"}, option)
    for option in (
        {"url": "mysql://me:hunter2@h/d"},
        {"url": "mysql://me@h/d?ssl_verify_cert=1"},
        {"url": "mysql://me@h/d?sslmode=maybe"},
        {"dbtable": "`a"},
        {"ledgerSchema": ""},
    )
]
_OPTIONS += [
    ("iceberg", "sink", {"table": "shop.orders", "warehouse": "/data/lake"}, option)
    for option in (
        {"table": "orders"},
        {"warehouse": "s3://key:hunter2@bucket"},
        {"catalog.uri": "postgresql://me:hunter2@h/d"},
        {"catalog.uri": "http://h:8181"},
        {"catalog.py-io-impl": "evil.Module"},
        {"partitionBy": "days(day"},
        {"compression": "rar"},
    )
]
_OPTIONS += [
    ("delta", "sink", {"path": "/data/t"}, {"path": "s3://key:hunt/er2@bucket/t"}),
    ("delta", "sink", {"path": "/data/t"}, {"storage.endpoint": "http://me:hunter2@h"}),
    ("files", "sink", {"path": "/data/t"}, {"fileFormat": "xls"}),
    ("files", "sink", {"path": "/data/t"}, {"path": "s3://bucket/t"}),
    ("sqlite", "sink", {"path": "/data/o.db", "table": "t"}, {"path": "postgresql://me:hunter2@h/d"}),
    ("sqlite", "sink", {"path": "/data/o.db", "table": "t"}, {"table": "sqlite_master"}),
    ("log", "source", {"path": "/data/log"}, {"startingOffsets": "middle"}),
    ("log", "source", {"path": "/data/log"}, {"path": "https://h/?sig=hunter2"}),
    ("pulsar", "source", {"url": "pulsar://h:6650", "adminUrl": "http://h:8080", "topics": "t"}, {"url": "h:6650"}),
    ("pulsar", "source", {"url": "pulsar://h:6650", "adminUrl": "http://h:8080", "topics": "t"},
     {"adminUrl": "http://me:hunter2@h:8080"}),
    ("pulsar", "source", {"url": "pulsar://h:6650", "adminUrl": "http://h:8080", "topics": "t"}, {"schema": "xml"}),
    ("rabbitmq", "source", {"url": "amqp://h", "queue": "q", **_RECEIVED}, {"url": "amqp://me:hunter2@h"}),
    ("rabbitmq", "source", {"url": "amqp://h", "queue": "q", **_RECEIVED}, {"badMessages": "ignore"}),
    ("rabbitmq", "source", {"url": "amqp://h", "queue": "q", **_RECEIVED}, {"dedupFor": "a while"}),
    ("rabbitmq", "sink", {"url": "amqp://h", "routingKey": "q", **_LEDGER}, {"url": "http://h"}),
    ("activemq", "sink", {"url": "stomp://h", "queue": "q", **_LEDGER}, {"url": "stomp://me:hunter2@h:61613"}),
    ("activemq", "sink", {"url": "stomp://h", "queue": "q", **_LEDGER}, {"ledger": ""}),
    ("rocketmq", "source", {"endpoints": "h:8081", "topic": "t", "group": "g", **_RECEIVED}, {"tls": "perhaps"}),
    ("rocketmq", "sink", {"endpoints": "h:8081", "topic": "t", **_LEDGER}, {"messageType": "BULK"}),
    ("outbox", "source", {"url": "postgresql://me@h/d"}, {"method": "triggers"}),
    ("outbox", "source", {"url": "postgresql://me@h/d"}, {"url": "postgresql://me:hunter2@h/d"}),
    ("saga", "sink", {"saga": "m:s", "log": "/data/s.db", **_LEDGER}, {"log": "postgresql://me:hunter2@h/d"}),
    ("saga", "sink", {"saga": "m:s", "log": "/data/s.db", **_LEDGER}, {"threads": "0"}),
]  # fmt: skip


def option_files() -> Iterator[tuple[str, str]]:
    """Name and text of a file for each bad option."""
    for system, role, base, bad in _OPTIONS:
        entry = ", ".join(f"{k}: {_quoted(v)}" for k, v in {"format": system, **base, **bad}.items())
        name = f"{system} {role}, {', '.join(f'{k}={v}' for k, v in bad.items())}"
        if role == "source":
            yield name, f"{HEAD}source: {{{entry}}}\n{SINK}"
        else:
            yield name, f"{HEAD}{SOURCE}sinks: [{{{entry}}}]\n"


def _quoted(text: str) -> str:
    return "'" + text.replace("'", "''") + "'"
