"""The planner's input: sources, sinks, a request."""

from __future__ import annotations

from delivered.model.capability import Commit, Guarantee, SinkCapability, SourceCapability
from delivered.pipeline.facts import alternatives
from delivered.planner import (
    CheckpointFacts,
    Request,
    SinkFacts,
    SourceFacts,
    TransformFacts,
)

KAFKA = SourceFacts("kafka orders", SourceCapability("kafka", replayable=True, sent_twice=True))
QUEUE = SourceFacts("queue orders", SourceCapability("queue", replayable=False, why_not="it forgets what it delivered"))
LOG = SourceFacts("log orders", SourceCapability("log", replayable=True, local=True))
TO_KAFKA = SinkFacts(
    "orders-clean",
    "kafka orders-clean",
    SinkCapability(
        no_position="",
        system="kafka",
        commit=Commit.TWO_PHASE,
        mechanism="two-phase commit",
        stage="a Kafka transaction per shard, invisible",
        prepare="flushed, marker inside the transaction",
        decide="one record in __delivered",
        apply="EndTxn per shard",
        send="idempotent producer, acks=all",
        batch_atomic=False,
        validates=True,
        prepared_timeout_s=600,
        assumes=("readers of orders-clean use isolation.level=read_committed",),
    ),
)
TO_SQLITE = SinkFacts(
    "orders",
    "sqlite orders.db orders",
    SinkCapability(
        no_position="",
        system="sqlite",
        commit=Commit.ONE_TRANSACTION,
        mechanism="one transaction for rows and ledger",
        stage="rows into a file per shard",
        prepare="the file is durable",
        decide="COMMIT of rows and ledger row",
        apply="the shard's rows into the open transaction",
        send="INSERT, a transaction per chunk",
        batch_atomic=True,
        validates=True,
        local=True,
    ),
)
TO_POSTGRES = SinkFacts(
    "totals",
    "postgres totals",
    SinkCapability(
        no_position="",
        system="postgres",
        commit=Commit.TWO_PHASE,
        mechanism="two-phase commit",
        stage="COPY in a transaction per shard, invisible",
        prepare="PREPARE TRANSACTION",
        decide="one row in the ledger",
        apply="COMMIT PREPARED per shard",
        send="COPY, a transaction per shard",
        batch_atomic=False,
        validates=True,
        assumes=("the database is backed up and restored as one",),
    ),
)
TO_HTTP = SinkFacts(
    "hook",
    "http hook",
    SinkCapability(
        no_position="",
        system="http",
        commit=Commit.NONE,
        mechanism="",
        stage="",
        prepare="",
        decide="",
        apply="",
        send="a request per row",
        batch_atomic=False,
        can_disable_retries=False,
    ),
)
ASKED = Request(
    pipeline="orders",
    guarantee=Guarantee.EXACTLY_ONCE,
    sources=(KAFKA,),
    sinks=(TO_KAFKA,),
    checkpoint=CheckpointFacts("/data/checkpoints/orders"),
    transform=TransformFacts("sql", "SELECT key, value FROM source"),
    alternatives=alternatives,
)
