"""Phase 2, before anything runs: request -> rules -> Plan(steps) or Refusal. Pure: no clock, no server, no Spark.

request.py   what was asked, and the facts that were gathered about it
rules.py     small functions; each may refuse, and says why and what to do instead
steps.py     the steps of each mechanism, in the order in which the engine meets them
plan.py      puts them together: `make_plan`
explain.py   a plan or a refusal as text and as JSON
"""

from delivered.planner.explain import to_json, to_text
from delivered.planner.plan import Plan, Refusal, make_plan
from delivered.planner.request import (
    CheckpointFacts,
    EarlierFacts,
    Execution,
    OwnerFacts,
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
    "OwnerFacts",
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
