"""Ledgers and committers of this driver, kept warm in the reused worker between batches.

Two long-lived processes of one driver use this module: the one in which Spark plans a batch, and the one in which it
commits. Both know the driver's id from the registered class, so they are one owner.
"""

from __future__ import annotations

import socket
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import replace

from delivered.contract.sink import Sink, SinkGroup
from delivered.engine.context import Context
from delivered.model.identity import Scope
from delivered.model.work import CheckpointView, Owner
from delivered.spark.driver import Driver
from delivered.spark.settings import PipelineSettings

_CONTEXTS_MAX = 8

_contexts: OrderedDict[tuple[Scope, str, str], Context] = OrderedDict()
_planned: dict[tuple[Scope, str], tuple[int, int, str]] = {}
"""The batch planned last, the epoch of its plan, and the start of the query that it belongs to."""


def owner(driver: Driver) -> Owner:
    """This driver, with what a person needs to find it: host and process id of the JVM."""
    found = driver.located()
    return Owner(found.id, socket.gethostname(), found.process, found.started_ms)


def context(
    sink: Sink | SinkGroup, options: Mapping[str, str], settings: PipelineSettings, incarnation: str, driver: Driver
) -> Context:
    """The context of the sinks of one pipeline, opened once per process."""
    scope = Scope(settings.pipeline, settings.sink or sink.name, incarnation)
    key = (scope, driver.id, repr(sorted(options.items())) + repr(replace(settings, start="")))
    if key in _contexts:
        _contexts.move_to_end(key)
        return _contexts[key]
    _contexts[key] = Context.open(
        sink, scope, settings.guarantee, owner(driver), settings.tolerance, settings.transform
    )
    while len(_contexts) > _CONTEXTS_MAX:
        _, old = _contexts.popitem(last=False)
        old.ledger.close()
        old.committer.close()
    return _contexts[key]


def is_first(scope: Scope, driver: Driver, view: CheckpointView, start: str) -> bool:
    """Whether recovery must claim and abort orphans: unless this process planned the batch before, in the same start of
    the query, and Spark logged it."""
    before, _, began = _planned.get((scope, driver.id), (None, None, start))
    return before is None or before != view.batch - 1 or view.logged != before or began != start


def epoch(scope: Scope, driver: Driver) -> int | None:
    """The ledger's epoch that the plan before rested on, if it was made in this process."""
    return _planned.get((scope, driver.id), (None, None, ""))[1]


def remember(scope: Scope, driver: Driver, batch: int, epoch: int, start: str) -> None:
    _planned[(scope, driver.id)] = (batch, epoch, start)


def forget(scope: Scope, driver: Driver) -> None:
    """The batch failed here: the next plan recovers in full."""
    _planned.pop((scope, driver.id), None)
