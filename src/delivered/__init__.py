"""Delivery guarantees for PySpark Structured Streaming: named, explained, and proved afterwards.

    delivered.register(spark)                   # df.writeStream.format("delivered_kafka").option("guarantee", ...)
    pipeline = delivered.Pipeline(name=..., guarantee="exactly_once", checkpoint=..., source=..., sinks=[...])
    print(pipeline.plan()); query = pipeline.start(spark); print(pipeline.audit(spark))

Importing this imports neither Spark nor a client library; names are loaded when they are used.
"""

from __future__ import annotations

import logging
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from delivered.audit.report import AuditReport, ChainReport
    from delivered.audit.spark.chain import audit_chain
    from delivered.entry import Pipeline
    from delivered.model.capability import Dedup, Guarantee
    from delivered.model.errors import (
        BadRecord,
        DeliveredError,
        Fenced,
        InvariantBroken,
        LedgerAhead,
        LedgerBehind,
        MissingExtra,
        OutcomeUnknown,
        PromiseBroken,
        Refused,
        ReplayDiffers,
        Unreachable,
        UsageError,
    )
    from delivered.pipeline.endpoint import (
        Endpoint,
        delta,
        endpoint,
        files,
        iceberg,
        kafka,
        log,
        mysql,
        postgres,
        sqlite,
    )
    from delivered.pipeline.receive import receive
    from delivered.pipeline.transform import Transform, arrow, dedup, transform
    from delivered.planner.answer import Plan, Refusal
    from delivered.spark.foreach import write_batch
    from delivered.spark.session import register, session

_WHERE = {
    "AuditReport": "delivered.audit.report",
    "BadRecord": "delivered.model.errors",
    "ChainReport": "delivered.audit.report",
    "Dedup": "delivered.model.capability",
    "DeliveredError": "delivered.model.errors",
    "Endpoint": "delivered.pipeline.endpoint",
    "Fenced": "delivered.model.errors",
    "Guarantee": "delivered.model.capability",
    "InvariantBroken": "delivered.model.errors",
    "LedgerAhead": "delivered.model.errors",
    "LedgerBehind": "delivered.model.errors",
    "MissingExtra": "delivered.model.errors",
    "OutcomeUnknown": "delivered.model.errors",
    "Pipeline": "delivered.entry",
    "Plan": "delivered.planner.answer",
    "PromiseBroken": "delivered.model.errors",
    "Refusal": "delivered.planner.answer",
    "Refused": "delivered.model.errors",
    "ReplayDiffers": "delivered.model.errors",
    "Transform": "delivered.pipeline.transform",
    "Unreachable": "delivered.model.errors",
    "UsageError": "delivered.model.errors",
    "arrow": "delivered.pipeline.transform",
    "audit_chain": "delivered.audit.spark.chain",
    "dedup": "delivered.pipeline.transform",
    "delta": "delivered.pipeline.endpoint",
    "endpoint": "delivered.pipeline.endpoint",
    "files": "delivered.pipeline.endpoint",
    "iceberg": "delivered.pipeline.endpoint",
    "kafka": "delivered.pipeline.endpoint",
    "log": "delivered.pipeline.endpoint",
    "mysql": "delivered.pipeline.endpoint",
    "postgres": "delivered.pipeline.endpoint",
    "receive": "delivered.pipeline.receive",
    "register": "delivered.spark.session",
    "session": "delivered.spark.session",
    "sqlite": "delivered.pipeline.endpoint",
    "transform": "delivered.pipeline.transform",
    "write_batch": "delivered.spark.foreach",
}

__all__ = [
    "AuditReport",
    "BadRecord",
    "ChainReport",
    "Dedup",
    "DeliveredError",
    "Endpoint",
    "Fenced",
    "Guarantee",
    "InvariantBroken",
    "LedgerAhead",
    "LedgerBehind",
    "MissingExtra",
    "OutcomeUnknown",
    "Pipeline",
    "Plan",
    "PromiseBroken",
    "Refusal",
    "Refused",
    "ReplayDiffers",
    "Transform",
    "Unreachable",
    "UsageError",
    "arrow",
    "audit_chain",
    "dedup",
    "delta",
    "endpoint",
    "files",
    "iceberg",
    "kafka",
    "log",
    "mysql",
    "postgres",
    "receive",
    "register",
    "session",
    "sqlite",
    "transform",
    "write_batch",
]

logging.getLogger("delivered").addHandler(logging.NullHandler())


def __getattr__(name: str) -> Any:
    if name not in _WHERE:
        raise AttributeError(f"module 'delivered' has no attribute {name!r}")
    value = getattr(import_module(_WHERE[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
