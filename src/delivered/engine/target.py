"""Whether the sinks still write to the targets of the last batch.

A topic or table that was dropped and recreated has the same name but none of the delivered records. An external ledger
cannot notice that, so each decision contains the targets' identities.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from delivered.engine.context import Context
from delivered.model.errors import TargetChanged
from delivered.model.identity import Target
from delivered.model.work import Decision

_IN_WORDS = re.compile(r".*(?:with (?:id|oid|UUID)|generation) (\S+)", re.DOTALL)
"""Decisions of earlier versions also contain the name, which has several spellings: "topic t with id 3f0c"."""


def known_targets(context: Context, last: Decision | None) -> Mapping[str, str]:
    """Targets of any batch but a start's first: those of the last decision, if it has any."""
    return last.targets if last is not None and last.targets else _ids(_now(context))


def decided_targets(context: Context, last: Decision | None, planned: Mapping[str, str]) -> Mapping[str, str]:
    """Targets for a batch's decision, as planned; read again if its tasks may have created some."""
    return planned if planned and last is not None else {**_ids(_now(context)), **planned}


def check_targets(context: Context, last: Decision | None) -> Mapping[str, str]:
    """Query the sinks' targets, and compare them with this incarnation's last decision.

    Runs on the driver, at the first batch of a start, before anything is applied. Accepts sinks that the last decision
    does not name, and decisions of versions that stored no targets.

    Raises:
        TargetChanged: a target was recreated, or is gone, and the user did not accept that.
    """
    now = _now(context)
    if last is None or context.tolerance.new_target:
        return _ids(now)
    sinks = context.sinks
    for sink, before in sorted(last.targets.items()):
        if sink in sinks and not (sink in now and same_target(before, now[sink])):
            written_to = before if _IN_WORDS.fullmatch(before) else f"a target with id {before}"
            state = f"its target is now {now[sink]}" if sink in now else "no such target exists now"
            raise TargetChanged(
                "TARGET_CHANGED",
                f"Sink {sink!r} of pipeline {context.scope.pipeline!r}: batch {last.batch} was written to "
                f"{written_to}, but {state}. It was dropped or recreated, and lacks the "
                f"{last.account(sink).total.count} records delivered before. Nothing was written.",
                next_step="restore the original target; or redeliver everything with a new checkpoint; or continue "
                'with the new target as it is: accept it once with .option("newTarget", "accept")',
            )
    return _ids(now)


def same_target(before: str, now: Target) -> bool:
    """Whether a decision's target is the current one."""
    if (words := _IN_WORDS.fullmatch(before)) is not None:
        return words[1] == now.id.partition("@")[0]
    return before == now.id


def _ids(targets: Mapping[str, Target]) -> Mapping[str, str]:
    return {sink: target.id for sink, target in targets.items()}


def _now(context: Context) -> Mapping[str, Target]:
    return context.committers.targets()
