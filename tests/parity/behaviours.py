"""The assertions of Spark's own Kafka suites, row by row: behaviour of its connector and of this one.

docs/connectors/kafka-parity.md is generated from this. `tests/spark/test_parity.py` runs every row: it fails if
an outcome changed, even if the two have become equal.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

Fact = str | int | bool | None


@dataclass(frozen=True)
class Differs:
    """
    Attributes:
        spark, ours: what is observed.
        why: for the page.
        missing: Spark's connector has it, this one does not.
    """

    spark: Fact
    ours: Fact
    why: str
    missing: bool = False


@dataclass(frozen=True)
class Area:
    """
    Attributes:
        title: for the page.
        suites: Spark's suites that the rows come from.
        facts: what is looked at -> what is observed.
        matrix: `make verify` runs it, not `make test`.
    """

    title: str
    suites: str
    facts: Mapping[str, Fact | Differs]
    matrix: bool = False


@dataclass(frozen=True)
class Row:
    """
    Attributes:
        scenario: the function in `scenarios` that observes it, with its argument after "@".
    """

    scenario: str
    what: str
    spark: Fact
    ours: Fact
    verdict: str
    why: str
    matrix: bool


def _missing(spark: Fact, ours: Fact, why: str) -> Differs:
    return Differs(spark, ours, why, missing=True)


_BEGAN = {
    "latest": "nothing",
    "earliest": "0..2 10..12 20..22 30..32 40..42",
    "offsets": "0..2 20..22 31..32 42",
    "startingOffsetsByTimestamp": "2 11..12 21..22 32 40..42",
    "startingTimestamp": "2 11..12 21..22 32 43..44",
}
STARTS: dict[str, Fact | Differs] = {
    f"{how} from {where}, failOnDataLoss={loss}": (
        f"{began}; in all {began if where != 'latest' else ''} 50..51 60..64{' 70..71' if how != 'assign' else ''} 80"
    ).replace("  ", " ")
    for how in ("subscribe", "subscribePattern", "assign")
    for where, began in _BEGAN.items()
    for loss in ("true", "false")
}
STARTS_ALWAYS = ("subscribe from latest, failOnDataLoss=true",)
"""Rows of the matrix that `make test` runs."""

AREAS: dict[str, Area] = {
    "options_stream": Area(
        "Options of a stream",
        "KafkaMicroBatchSourceSuite, KafkaSourceProviderSuite, JsonUtilsSuite",
        {
            "no topic": "refused",
            "subscribe and subscribePattern": "refused",
            "subscribe and assign": "refused",
            "empty assign": "refused",
            "assign without partitions": Differs(
                "accepted", "refused", "Refused at load(); Spark's connector refuses it when the query runs."
            ),
            "empty subscribe": "refused",
            "empty subscribePattern": "refused",
            "no bootstrap.servers": Differs(
                "accepted", "refused", "Refused at load(); Spark's connector refuses it when the query runs."
            ),
            "minOffsetsPerTrigger": "accepted",
            "maxTriggerDelay": "accepted",
            "minOffsetsPerTrigger above the maximum": "refused",
            "minPartitions": "accepted",
            "maxRecordsPerPartition": "accepted",
            "MAXOFFSETSPERTRIGGER": "accepted",
            "maxoffsetspertrigger": "accepted",
            "MINOFFSETSPERTRIGGER": "accepted",
            "MAXTRIGGERDELAY": "accepted",
            "KAFKACONSUMER.POLLTIMEOUTMS": "accepted",
            "FETCHOFFSET.NUMRETRIES": "accepted",
            "FETCHOFFSET.RETRYINTERVALMS": "accepted",
            "kafka.group.id": "accepted",
            "groupIdPrefix": "accepted",
            "kafka.auto.offset.reset": "refused",
            "kafka.auto.offset.reset none": "refused",
            "kafka.auto.offset.reset earliest": "refused",
            "kafka.auto.offset.reset latest": "refused",
            "kafka.enable.auto.commit": "refused",
            "kafka.interceptor.classes": "refused",
            "kafka.key.deserializer": "refused",
            "kafka.value.deserializer": "refused",
            "kafka.isolation.level": "accepted",
            "kafka.max.poll.records": Differs(
                "accepted", "refused", "There is no such poll: batches have their own size."
            ),
            "kafka.metadata.max.age.ms": "accepted",
            "kafka.request.timeout.ms": "accepted",
            "kafka.default.api.timeout.ms": Differs("accepted", "refused", "Write `kafka.socket.timeout.ms`."),
            "startingOffsets in any case": "accepted",
            "startingOffsets with a topic in capitals": "accepted",
            "startingOffsets that are not JSON": Differs(
                "accepted", "refused", "Refused at load(); Spark's connector refuses it when the query runs."
            ),
            "startingOffsets as a list": Differs(
                "accepted", "refused", "Refused at load(); Spark's connector refuses it when the query runs."
            ),
            "startingOffsets of text": Differs(
                "accepted", "refused", "Refused at load(); Spark's connector refuses it when the query runs."
            ),
            "startingOffsetsByTimestamp": "accepted",
            "startingTimestamp": "accepted",
            "startingTimestamp of text": Differs(
                "accepted", "refused", "Refused at load(); Spark's connector refuses it when the query runs."
            ),
            "unknown strategy": Differs("accepted", "refused", "Spark's connector treats it as `error`."),
            "includeHeaders": "accepted",
            "an unknown option": Differs(
                "accepted", "refused", "Refused with the nearest name: a misspelt option is never ignored silently."
            ),
        },
    ),
    "options_start": Area(
        "Options of a batch read, given to a stream",
        "KafkaMicroBatchSourceSuite",
        {
            "endingOffsets of a stream": "refused",
            "endingOffsetsByTimestamp of a stream": "refused",
            "endingTimestamp of a stream": Differs(
                "0", "refused", "Refused like the two other ends; Spark's connector ignores it."
            ),
            "the format by the name of its class": _missing(
                "accepted", "refused", "A Python source has a short name only: delivered_kafka."
            ),
        },
        matrix=True,
    ),
    "options_batch": Area(
        "Options of a batch read",
        "KafkaRelationSuite, KafkaOffsetReaderSuite",
        {
            "start at latest": "refused",
            "start at latest, as -1": "refused",
            "end at earliest": "refused",
            "end at earliest, as -2": "refused",
            "no topic": "refused",
            "subscribe and subscribePattern": "refused",
            "subscribe and assign": "refused",
            "empty assign": "refused",
            "empty subscribe": "refused",
            "empty subscribePattern": "refused",
            "minPartitions=a": "refused",
            "minPartitions=1.0": "refused",
            "minPartitions=0": "refused",
            "minPartitions=-1": "refused",
            "invalid isolation.level": "refused",
            "an offset below -2": "refused",
        },
        matrix=True,
    ),
    "batch_offsets": Area(
        "Batch reads by offset",
        "KafkaRelationSuite, ConsumerStrategySuite",
        {
            "defaults": "0..9 100..109 200",
            "earliest to latest": "0..9 100..109 200",
            "words in any case": "0..9 100..109 200",
            "numbers, -2 and -1": "0..9 103..106 200",
            "a partition without offsets between": "109",
            "assign": "0..9 200",
            "pattern": "0..9 100..109 200",
            "pattern found in a part of the name": "0..9 100..109 200",
            "pattern without a match": "nothing",
            "two topics": "0 0..9 100..109 200",
            "an empty topic": "nothing",
            "start at the end": "nothing",
            "a missing topic": "refused",
            "assign a missing partition": Differs("0..9", "refused", "Spark's connector silently reads the others."),
            "start names too few partitions": "refused",
            "start names a foreign partition": "refused",
            "start and end name different partitions": "refused",
            "start after end, as given": "refused",
            "start beyond the latest": "refused",
            "the same DataFrame twice in a query": "0 0",
            "a DataFrame read again sees later records": Differs(
                "0..9 100..109 200..204",
                "0..9 100..109 200",
                "PySpark plans a Python source once per DataFrame: call load() again.",
            ),
            "an RDD of it read again sees later records": Differs(
                "0..9 100..109 200..204",
                "0..9 100..109 200",
                "PySpark plans a Python source once per DataFrame: call load() again.",
            ),
        },
        matrix=True,
    ),
    "batch_times": Area(
        "Batch reads by time",
        "KafkaRelationSuite, KafkaOffsetReaderSuite",
        {
            "per partition, start and end": "10..19",
            "start by time, end by offset": "0..4 6..7 9..10 12..13 15..16 18..19 21..22 24..25 27..28",
            "start by offset, end by time": "0..19",
            "start by time alone": "10..29",
            "end by time alone": "0..19",
            "startingTimestamp and endingTimestamp": "10..19",
            "startingTimestamp alone": "10..29",
            "endingTimestamp alone": "0..19",
            "no record at or after the start": "refused",
            "no record, strategy error": "refused",
            "no record, strategy latest": "10 12..13 15..16 18..19 21..22 24..25 27..28",
            "no record at or after the end": "0..9 11 14 17 20 23 26 29",
            "startingTimestamp wins over startingOffsetsByTimestamp": "20..29",
            "startingOffsetsByTimestamp wins over startingOffsets": "10..29",
            "start after end, by time": "refused",
            "times name too few partitions": "refused",
            "times name a foreign partition": "refused",
            "with assign": "12 15 18 21 24 27",
            "with a pattern": "20..29",
        },
        matrix=True,
    ),
    "batch_columns": Area(
        "Columns",
        "KafkaRelationSuite, KafkaMicroBatchSourceSuite",
        {
            "columns": (
                "struct<key:binary,value:binary,topic:string,partition:int,offset:bigint,timestamp:timestamp,"
                "timestampType:int>"
            ),
            "with headers": "headers:array<struct<key:string,value:binary>>>",
            "all columns may be null": True,
            "key and value are bytes": "bytes k",
            "a missing key is null": True,
            "a null value is null": True,
            "key and value null": True,
            "topic, partition, offset": "True 0 [0, 1, 2, 3, 4]",
            "time of a record": True,
            "a time in nanoseconds, beyond all dates": "refused",
            "timestampType of a producer": 0,
            "timestampType of the broker": 1,
            "headers in order": "a=b c=d",
            "a header twice, and one without value": "e=f e=g n=None",
            "no headers are null": None,
            "counts without values": "5 2 3 4",
            "filter and projection": "1 3",
        },
    ),
    "batch_pieces": Area(
        "minPartitions",
        "KafkaOffsetRangeCalculatorSuite, KafkaOffsetReaderSuite",
        {
            "one task for each partition": "0:1-2 1:1-2 2:1-2",
            "empty partitions have no task": "0:1-2",
            "minPartitions equals the partitions": "0:1-2 1:1-2 2:1-2",
            "one partition split in four": "0:1-2 0:2-3 0:3-4 0:4-5",
            "skewed partitions": "0:1-5 1:1-7 1:7-14 1:14-21",
            "very skewed partitions": "0:1-2 1:1-334 1:334-667 1:667-1001",
            "empty ranges ignored, the rest split": "1:1-6 1:6-11 1:11-16 1:16-21",
            "minPartitions below the partitions": "0:1-5 1:1-21",
            "range is no multiple of minPartitions": "0:1-4 0:4-7 0:7-11",
            "skewed partitions and an empty one": "0:1-5 1:1-7 1:7-14 1:14-21",
            "no offset is dropped": Differs(
                "0:0-3 0:3-6 0:6-10 1:0-3 1:3-6 1:6-10 2:0-1",
                "0:0-3 0:3-6 0:6-10 1:0-5 1:5-10 2:0-1",
                "Exactly as many tasks as requested; Spark's connector rounds per partition.",
            ),
            "three large ones in nine": (
                "0:0-5000 0:5000-10000 1:0-5000 1:5000-10000 1:10000-15000 2:0-5000 2:5000-10000 2:10000-15000 "
                "2:15000-20000"
            ),
            "a small one and two large ones": "0:0-500 1:0-6000 1:6000-12000 2:0-5000 2:5000-10000 2:10000-15001",
            "two small ones and a large one": "0:0-1 1:0-1 2:0-2500 2:2500-5000 2:5000-7500 2:7500-10000",
            "specific offsets in three": "0:1-2 0:2-3 0:3-4",
            "two partitions, one split in three": "0:0-33 0:33-66 0:66-100 1:0-3",
            "minPartitions above the offsets": "0:0-1 0:1-2 1:0-1",
        },
        matrix=True,
    ),
    "batch_transactions": Area(
        "Transactions in a batch read (read_committed; read_uncommitted)",
        "KafkaRelationSuite",
        {
            "open": "nothing; 1..5",
            "open, by default": Differs("1..5", "nothing", "The default is read_committed."),
            "committed": "1..5; 1..5",
            "aborted": "1..5; 1..10",
            "aborted, by default": Differs("1..10", "1..5", "The default is read_committed."),
            "committed after aborted": "1..5 11..15; 1..15",
            "nothing but aborted": "nothing",
        },
    ),
    "batch_losses": Area(
        "Deleted records, in a batch read",
        "KafkaDontFailOnDataLossSuite, KafkaRelationSuite",
        {
            "deleted records, failOnDataLoss": "refused",
            "deleted records, failOnDataLoss=false": "20..49",
            "earliest after a deletion": "20..49",
            "earliest is looked up when it is read": "40..49",
        },
        matrix=True,
    ),
    "stream_start": Area(
        "Starting offsets of a stream, across a restart and new partitions",
        "KafkaMicroBatchSourceSuite",
        STARTS,
    ),
    "stream_limits": Area(
        "Limits of a batch",
        "KafkaMicroBatchSourceSuite",
        {
            "AvailableNow keeps the limit": 3,
            "first batch, shared by backlog": Differs(
                "0..7 100 200", "0..6 100..101 200", "Shares are rounded by largest remainder."
            ),
            "second batch, shared by backlog": Differs(
                "8..16 101", "7..14 102..103", "Shares are rounded by largest remainder."
            ),
            "all batches": "0..100 100..110 200",
            "Once has no limit": "1 0..100 100..110 200",
            "Once again has no limit": "1 111..120",
            "a stop between limited batches": "0..120 200",
            "the largest long as limit": "2..4",
            "two limited sources, one at its end": "0..4 1000..1004 | 5..9 1005..1009 | 1010..1014 | 1015..1019",
        },
        matrix=True,
    ),
    "stream_min_offsets": Area(
        "minOffsetsPerTrigger",
        "KafkaMicroBatchSourceSuite",
        {
            "the first batch is not held back": "0..9 100..104 200",
            "fewer offsets wait": True,
            "enough offsets start a batch": "0..19 100..109 200",
            "maxTriggerDelay ends the wait": "0..19 100..111 200",
            "Once does not wait": "112..113",
            "with a maximum, first batch": 20,
        },
        matrix=True,
    ),
    "stream_times": Area(
        "A stream that starts after the last record",
        "KafkaMicroBatchSourceSuite",
        {
            "subscribe, startingOffsetsByTimestamp, no record after it, default": "refused",
            "subscribe, startingOffsetsByTimestamp, no record after it, error": "refused",
            "subscribe, startingOffsetsByTimestamp, no record after it, latest": "3",
            "subscribe, startingTimestamp, no record after it, default": "refused",
            "subscribe, startingTimestamp, no record after it, error": "refused",
            "subscribe, startingTimestamp, no record after it, latest": "3",
            "subscribePattern, startingOffsetsByTimestamp, no record after it, default": "refused",
            "subscribePattern, startingOffsetsByTimestamp, no record after it, error": "refused",
            "subscribePattern, startingOffsetsByTimestamp, no record after it, latest": "3",
            "subscribePattern, startingTimestamp, no record after it, default": "refused",
            "subscribePattern, startingTimestamp, no record after it, error": "refused",
            "subscribePattern, startingTimestamp, no record after it, latest": "3",
        },
        matrix=True,
    ),
    "stream_transactions": Area(
        "Transactions in a stream",
        "KafkaMicroBatchSourceSuite",
        {
            "read_committed": "nothing, nothing, 0..4, nothing, 12..16, 18 20 22..23",
            "read_uncommitted": "nothing, 0..4, nothing, 6..10, 12..16, 18 20 22..23",
            "records sent while a batch is read belong to the next": "0..3 | 4..7",
            "null keys and values": "None=None None=None 1=None None=2",
        },
        matrix=True,
    ),
    "stream_losses": Area(
        "Deleted records, in a stream",
        "KafkaDontFailOnDataLossSuite, KafkaMicroBatchSourceSuite",
        {
            "deleted before the start, failOnDataLoss=false": "20..49",
            "deleted before the start, failOnDataLoss": "refused",
            "deleted during a stop, failOnDataLoss=true": "refused",
            "deleted during a stop, failOnDataLoss=false": "15..19",
            "recreated during a stop, shorter, failOnDataLoss=true": "refused",
            "recreated during a stop, shorter, failOnDataLoss=false": "nothing",
            "recreated during a stop, longer": "5..8",
            "recreated during a stop, longer, checkpointLocation on the source": Differs(
                "5..8", "refused", "The topic's id is compared, not only its offsets."
            ),
            "a topic removed from subscribe": "refused",
        },
        matrix=True,
    ),
    "stream_available_now_changes": Area(
        "Topics that change under AvailableNow",
        "KafkaMicroBatchSourceSuite",
        {
            "AvailableNow, recreated with fewer partitions": "refused",
            "AvailableNow, recreated with fewer records": "refused",
            "AvailableNow, recreated with as many records": Differs(
                "0..14", "refused", "The topic's id is compared, not only its offsets."
            ),
            "AvailableNow, a failed batch again after new partitions": "the row's own error, the row's own error",
        },
        matrix=True,
    ),
    "stream_patterns": Area(
        "Topics by pattern",
        "KafkaMicroBatchSourceSuite, ConsumerStrategySuite",
        {
            "a topic created later is read from its start": "0..1",
            "a topic deleted, failOnDataLoss=false": "0 0..1 1..2 900",
            "no empty offsets are logged": True,
            "a topic recreated during a stop, shorter": "refused",
            "a pattern found in a part of the name": "0..1",
        },
        matrix=True,
    ),
    "stream_churn": Area(
        "Topics that come and go under a pattern, failOnDataLoss=false",
        "KafkaSourceStressForDontFailOnDataLossSuite, KafkaSourceStressSuite",
        {"topics created, deleted and recreated all the time": True},
        matrix=True,
    ),
    "stream_checkpoints": Area(
        "Checkpoints",
        "KafkaMicroBatchSourceSuite, KafkaSourceOffsetSuite",
        {
            "form of logged offsets": '{"t":{"0":3,"1":2}}',
            "a start without records is remembered": "1..2",
            "offsets that Spark's connector logged are read": "2..4",
            "first offsets that Spark 2.1.0 wrote, checkpointLocation on the source": "3..4",
            "first offsets that a newer Spark wrote, checkpointLocation on the source": "refused",
            "first offsets are in sources/0/0, after a zero byte": Differs(
                True, False, "They are in delivered/source-offsets.json. Those in sources/0/0 are read."
            ),
            "other starting offsets do not count for a checkpoint": "50",
            "a topic added to subscribe": "0..1",
            "state of a query without headers continues": "7",
        },
        matrix=True,
    ),
    "stream_progress": Area(
        "Progress",
        "KafkaMicroBatchSourceSuite",
        {
            "numInputRows": 10,
            "names of metrics": "avgOffsetsBehindLatest maxOffsetsBehindLatest minOffsetsBehindLatest",
            "behind with a limit": True,
            "not behind without one": True,
            "endOffset": '{"t":{"0":5,"1":5}}',
            "latestOffset": '{"t":{"0":5,"1":5}}',
            "description names the topic": True,
            "the same in the progress as JSON, which Spark's JVM wrote": _missing(
                True, False, "A Python source cannot report them to the JVM; they are added to progress in Python."
            ),
        },
        matrix=True,
    ),
    "stream_shapes": Area(
        "Queries over a stream",
        "KafkaMicroBatchSourceSuite",
        {
            "watermark on timestamp": "1 True",
            "self-join": "1-1 1-6 2-2 3-3 6-1 6-6",
            "self-join logs one offset": 2,
            "rows read by a self-join": 4,
            "rows read by a self-join without exchange reuse": 8,
            "minPartitions": True,
        },
        matrix=True,
    ),
    "stream_during": Area(
        "While a batch runs",
        "KafkaMicroBatchSourceSuite, KafkaDontFailOnDataLossSuite",
        {
            "a topic deleted in a batch, failOnDataLoss=false": True,
            "a consumer group named by kafka.group.id, with deprecated offset fetching": Differs(
                True,
                False,
                "Offsets are never asked for through a group; commitOffsetsToGroup publishes progress to one.",
            ),
            "a consumer group named by groupIdPrefix, with deprecated offset fetching": Differs(
                True,
                False,
                "Offsets are never asked for through a group; commitOffsetsToGroup publishes progress to one.",
            ),
            "a query stops on request": True,
        },
        matrix=True,
    ),
    "stream_modes": Area(
        "Modes and triggers",
        "KafkaContinuousSourceSuite, KafkaMicroBatchSourceSuite, KafkaSinkSuite",
        {
            "continuous processing": _missing(
                "runs", "refused", "Spark has no continuous processing for Python sources."
            ),
            "asynchronous progress": _missing("0..2", "refused", "Spark supports it for its own sinks only."),
            "update mode": _missing(
                "runs",
                "refused",
                "Spark does not offer it to Python sinks: use `output_mode` or `write_batch` (docs/stateful.md).",
            ),
            "complete mode without aggregation": "refused",
        },
        matrix=True,
    ),
    "sink_rows": Area(
        "Rows written",
        "KafkaSinkSuite",
        {
            "value alone": "None=v",
            "key and value": "k=v",
            "binary key and value": "k=v",
            "null key": "None=v",
            "null value": "k=None",
            "headers": "None=v a:b",
            "a header twice": "None=v e:f e:g",
            "null headers": "None=v",
            "a header without a key": "refused",
            "a header without a value": "None=v a:None",
            "a null among headers": "refused",
            "topic column": "None=v",
            "topic option wins over topic column": "None=v",
            "null topic column with the option": "None=v",
            "many rows": "0..999",
            "structs by to_json": 'None={"id":0}',
            "keys spread over partitions": "0 3 0 3 1",
            "partition column": "2",
            "null partition column": True,
            "partition column wins over partitioner.class": _missing(
                "2", "refused", "partitioner.class names Java code."
            ),
            "partitioner.class": _missing(5, "refused", "It names Java code: use the column `partition`."),
            "a missing partition": "refused",
            "large values, small buffer": 200,
            "columns in upper case": "refused",
        },
        matrix=True,  # tests/broker/test_kafka_sink.py writes them without Spark
    ),
    "sink_refusals": Area(
        "Rows and options that a sink refuses",
        "KafkaSinkSuite",
        {
            "no topic": "refused",
            "no value": "refused",
            "null topic without the option": "refused",
            "an invalid topic name": "refused",
            "topic is a number": "refused",
            "value is a number": "refused",
            "key is a number": "refused",
            "partition is text": "refused",
            "partition is a long": Differs("refused", "written", "Any integer type is accepted."),
            "headers of another type": "refused",
            "overwrite": "refused",
            "ignore": "refused",
            "error if exists": Differs(
                "written", "refused", 'Spark does not offer the default mode to Python sinks: use mode("append").'
            ),
            "a missing topic": "refused",
            "unknown column": Differs("written", "refused", "No column is lost silently."),
            "columns of the source": "written",
            "key.serializer": "refused",
            "value.serializer": "refused",
            "acks=1": Differs("written", "refused", "at_least_once needs acks=all; at_most_once accepts it."),
            "acks=all": "written",
            "retries": "written",
            "enable.idempotence": Differs("written", "refused", "The guarantee chooses it."),
            "max.block.ms": Differs(
                "written", "refused", "librdkafka does not block: write `kafka.delivery.timeout.ms`."
            ),
            "buffer.memory": "written",
            "linger.ms": "written",
            "compression.type": "written",
            "an unknown option": Differs("written", "refused", "Refused with the nearest name."),
            "includeHeaders": Differs("written", "refused", "An option of the source."),
            "a DataFrame of the source, unchanged": "written",
        },
        matrix=True,
    ),
    "sink_streams": Area(
        "Streams written",
        "KafkaSinkSuite",
        {
            "topic column": "0..9",
            "topic option": "0..9",
            "topic option wins over topic column": "0..9",
            "no topic": "refused",
            "no value": "refused",
            "topic is a number": "refused",
            "value is a number": "refused",
            "key is a number": "refused",
            "partition is text": "refused",
            "a missing topic": "refused",
            "key.serializer": "refused",
            "value.serializer": "refused",
            "progress reports the rows written": 10,
        },
        matrix=True,
    ),
}


def rows() -> Iterator[Row]:
    """Every row, in the order of the page."""
    for scenario, area in AREAS.items():
        for what, fact in area.facts.items():
            asked = f"{scenario}@{what}" if scenario == "stream_start" else scenario
            matrix = area.matrix or (scenario == "stream_start" and what not in STARTS_ALWAYS)
            if isinstance(fact, Differs):
                verdict = "missing" if fact.missing else "different"
                yield Row(asked, what, fact.spark, fact.ours, verdict, fact.why, matrix)
            else:
                yield Row(asked, what, fact, fact, "same", "", matrix)
