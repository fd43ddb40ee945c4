"""Bugs seen in other systems, and the tests that keep them out of this one: the page docs/pitfalls.md.

The files are those that name a number, in a docstring or a comment: nothing of that column is written by hand.
"""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
_NUMBER = re.compile(r"(?:\bP|test_p|(?<=_)p)([1-9][0-9]?)(?=\b|_)")

PITFALLS = {
    1: ("A replayed micro-batch was committed twice, after the last file of `checkpoint/commits/` was deleted.",
        "paimon#9666, hudi#6098", "A batch's identity is checked before its first write."),
    2: ("A new checkpoint starts at batch 0 again; its batches were mistaken for old ones and skipped.",
        "Delta's `txnAppId`, delta#1141, Qbeast#274", "The key of a decision holds the query's id."),
    3: ("A replay was recognised only within the retained snapshots.",
        "paimon#9667", "A ledger forgets only batches older than any that Spark can replay."),
    4: ("The table that gave exactly-once grew to 600 MB and hung the service.",
        "risingwave#21376",
        "A ledger keeps the newest 1,000 decisions of a sink, with files a record in each batch's folder; "
        "tested over a million batches in SQLite."),
    5: ("A transaction expired between checkpoint and commit; the job logged a possible loss and continued.",
        "Flink's KafkaCommitter, flink#5030, doris-spark-connector#205",
        "The marker is looked up; the shard is rewritten, or the query stops."),
    6: ("The commit phase could not be recovered; an unknown outcome was treated as success.",
        "arroyo#224, arroyo#1099", "`Unknown` is a type of its own, besides `Ok` and `Failed`."),
    7: ("A successful commit was reported as failed; the client sent it again.",
        "pulsar#19629", "Fence, look up, then act."),
    8: ("Deduplication recorded the id before the message was persisted, and dropped the retry.",
        "pulsar#5218", "Persist first."),
    9: ("A late EndTxn hit a later transaction of the same epoch.",
        "Jepsen on Bufstream and Kafka, KIP-890",
        "One epoch per transaction; a producer is never reused after an unknown outcome."),
    10: ("Transactional ids of dead checkpoints stayed on the broker for a week, until it ran out of memory.",
         "redpanda#12424", "Ids come from a bounded pool."),
    11: ("Hanging transactions of dead jobs blocked read_committed readers.",
         "flink-connector-kafka#238, #296",
         "Recovery aborts orphaned transactions; `delivered transactions list, abort, apply`."),
    12: ("The default time-out was above the broker's limit: every first start failed late.",
         "kickstarter#787", "Checked before the query starts."),
    13: ("Two sinks with one prefix fenced each other.",
         "flink-connector-kafka#156", "The prefix is pipeline and sink; duplicate names are refused."),
    14: ("Offset arithmetic mistook control records for a loss, or hid a real one.",
         "pinot#19161, hudi#3161, SPARK-25214", "Records are counted, offsets are not."),
    15: ("A shared producer: one task's abort aborted another task's transaction.",
         "spark#25618", "One producer per shard."),
    16: ("Commit may be called several times for one epoch.",
         "spark#20386", "`apply` is idempotent."),
    17: ("A prefetch cache leaked when a batch ended where it began.",
         "SPARK-55416", "An empty range reads nothing."),
    18: ("Idempotence by batch number fails if offsets are logged after the batch.",
         "Spark: real-time mode, asynchronous progress", "Refused."),
    19: ("A JDBC exactly-once sink duplicated rows when it retried.",
         "Flink: `maxRetries` must be 0", "No blind retry around decide or apply: fence, look up, then act."),
    20: ("Prepared transactions never expire; they hold locks and stop VACUUM.",
         "PostgreSQL", "Orphans are found by prefix; the age of open ones is shown and warned about."),
    21: ("A half message was dropped after 15 unanswered check-backs.",
         "RocketMQ", "The driver or its successor commits from the durable decision; the bound is stated."),
    22: ("A producer audit recognised duplicates only within a window.",
         "ActiveMQ: 2048 x 32", "A window is a stated bound, not a guarantee."),
    23: ("A subscription that was never acknowledged grew until it expired.",
         "pulsar-spark#178", "The source is acknowledged after Spark's commit log."),
    24: ("Empty transactions, exhausted epochs (32767), a transaction stuck at the overflow.",
         "kafka#18448, #18758, #19910, #21506", "Tested with an epoch close to the limit."),
    25: ("A state checkpoint older than the log let aborted writes survive.",
         "KAFKA-20685", "What was read is compared with what was decided, by fingerprint."),
    26: ("All rows of a batch were collected in an executor before the send.",
         "several Spark sinks", "Rows are streamed through a bounded queue."),
    27: ("A reader saw part of a batch between the commits of its participants.",
         "every sink of several transactions", "Atomic where the store can be; else measured and printed."),
    28: ("After a restart a coordinator reported transactions as complete whose markers were in no partition; the next "
         "commit of the same producer id made aborted rows visible.",
         "Kafka 4.3.0", "The end of a transaction is believed by the partitions' producer state."),
    29: ("A log lost its end and grew past the reader's position: its new records were never read.",
         "Kafka: unclean leader election, a restored disk",
         "Leader epochs and landmarks are kept with the offsets, and checked."),
    30: ("The newest of several decisions was chosen by wall clocks of hosts that differ.",
         "an earlier release of this package", "The ledger numbers its decisions."),
    31: ("A task's attempts were numbered from 0 again when its stage reran; records were sent twice.",
         "Spark", "What may have been sent is asked of the ledger and of the driver, not of a counter."),
    32: ("Rows that triggers, rules or conflict clauses dropped were counted as written.",
         "pglogical#303, frankensqlite#228", "The count of the database is compared before the decision."),
    33: ("Ids joined from several names or columns without escaping were equal for different ones.",
         "dlt#4274, dbt-utils#1015", "A joined id names one list of parts only; tested by properties."),
}  # fmt: skip
"""Number: what happened, where it was seen, the rule here. Numbers are never given to another one."""


def tests() -> dict[int, list[str]]:
    """Which files of tests name each number."""
    found: dict[int, list[str]] = {number: [] for number in PITFALLS}
    for path in sorted((ROOT / "tests").rglob("*.py")):
        for number in sorted({int(n) for n in _NUMBER.findall(path.read_text(encoding="utf-8"))}):
            found[number].append(path.relative_to(ROOT).as_posix())
    return found


def page() -> str:
    lines = [
        "# Bugs seen in other systems",
        "",
        "This page lists delivery bugs of other systems and of this one, the rule that each led to, and the tests that",
        "check it; read it if you review or change the engine. Code, docs and tests refer to a bug by its number, such",
        "as (P7). Numbers after # are issues or pull requests of the other project.",
        "",
        "| | what happened | seen in | rule here | tests |",
        "|---|---|---|---|---|",
    ]
    named = tests()
    for number, (what, where, rule) in PITFALLS.items():
        links = ", ".join(f"[{Path(p).stem.removeprefix('test_')}](../{p})" for p in named[number])
        lines.append(f'| <a id="p{number}"></a>P{number} | {what} | {where} | {rule} | {links or "none"} |')
    return "\n".join([*lines, ""])
