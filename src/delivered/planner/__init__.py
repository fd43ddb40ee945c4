"""Phase 2, before anything runs: request -> rules -> Plan(steps) or Refusal. Pure: no clock, no server, no Spark."""

from delivered.planner.answer import Plan, Refusal, to_json, to_text
from delivered.planner.plan import make_plan
from delivered.planner.request import (
    CheckpointFacts,
    EarlierFacts,
    Execution,
    Request,
    SinkFacts,
    SourceFacts,
    TransformFacts,
    Trigger,
)

__all__ = [
    "CheckpointFacts",
    "EarlierFacts",
    "Execution",
    "Plan",
    "Refusal",
    "Request",
    "SinkFacts",
    "SourceFacts",
    "TransformFacts",
    "Trigger",
    "make_plan",
    "to_json",
    "to_text",
]
