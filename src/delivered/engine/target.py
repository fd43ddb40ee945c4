"""What the sinks write to: whether it is still what the last batch was written to.

A topic or a table that was dropped and made anew has its former name and none of the delivered records. A ledger that
lies elsewhere cannot tell; so each decision holds what the system tells the targets by.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from delivered.contract.powers import KnowsTarget
from delivered.engine.context import Context
from delivered.model.errors import TargetChanged
from delivered.model.identity import Target
from delivered.model.work import Decision

_IN_WORDS = re.compile(r".*(?:with (?:id|oid|UUID)|generation) (\S+)", re.DOTALL)
"""Decisions of earlier versions hold "topic t with id 3f0c": also the name, which can be spelt in several ways."""


def known_targets(context: Context, last: Decision | None) -> Mapping[str, str]:
    """Targets of a batch that is not the first one of a start: those of the last decision, unless it holds none."""
    return last.targets if last is not None and last.targets else _ids(_now(context))


def decided_targets(context: Context, last: Decision | None, planned: Mapping[str, str]) -> Mapping[str, str]:
    """Targets for the decision of a batch, as planned; asked for again where its tasks may have made some."""
    return planned if planned and last is not None else {**_ids(_now(context)), **planned}


def check_targets(context: Context, last: Decision | None) -> Mapping[str, str]:
    """Ask the sinks for their targets; compare with those of the last decision of this incarnation.

    Runs on the driver, at the first batch of a start, before anything is applied. Sinks that the last decision does
    not name, and decisions of versions that did not keep targets, are accepted.

    Raises:
        TargetChanged: a target was made anew, or is gone, and the user did not accept that.
    """
    now = _now(context)
    if last is None or context.tolerance.new_target:
        return _ids(now)
    sinks = {context.scope.sink, *context.others}
    for sink, before in sorted(last.targets.items()):
        if sink in sinks and not (sink in now and same_target(before, now[sink])):
            written_to = before if _IN_WORDS.fullmatch(before) else f"a target with id {before}"
            found = f"its target now is {now[sink]}" if sink in now else "no such target is there now"
            raise TargetChanged(
                "TARGET_CHANGED",
                f"Sink {sink!r} of pipeline {context.scope.pipeline!r}: batch {last.batch} was written to "
                f"{written_to}, and {found}. It was dropped or made anew, and the {last.total_of(sink).count} records "
                "that were delivered before are not in it. Nothing was written.",
                next_step="restore the former target; or deliver everything again, with a new checkpoint; or go on "
                'with the new target as it is: accept it once with .option("newTarget", "accept")',
            )
    return _ids(now)


def same_target(before: str, now: Target) -> bool:
    """Whether a decision's target is the one that is there now."""
    if (words := _IN_WORDS.fullmatch(before)) is not None:
        return words[1] == now.id.partition("@")[0]
    return before == now.id


def _ids(targets: Mapping[str, Target]) -> Mapping[str, str]:
    return {sink: target.id for sink, target in targets.items()}


def _now(context: Context) -> Mapping[str, Target]:
    committer = context.committer
    return dict(committer.targets()) if isinstance(committer, KnowsTarget) else {}
