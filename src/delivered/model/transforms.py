"""Which versions of the transform a pipeline's batches ran with; every decision carries the list."""

from __future__ import annotations

import json
from dataclasses import replace

from delivered.model.account import Account, TransformVersion
from delivered.model.limits import TRANSFORM_VERSIONS_BYTES_MAX, TRANSFORM_VERSIONS_KEPT
from delivered.model.work import Decision

MIXED = "mixed"
"""Several versions of a transform that a ledger no longer distinguishes."""


def transforms_after(last: Decision | None, fingerprint: str, batch: int) -> tuple[TransformVersion, ...]:
    """`Decision.transforms` of a batch.

    Args:
        last: the decision before it, of the same incarnation; None: this is the first.
        fingerprint: of the transform that the batch ran with; empty: unknown.
    """
    if last is None:
        return (TransformVersion(fingerprint, batch),) if fingerprint else ()
    if last.transform == fingerprint:
        return last.transforms
    sink = last.scope.sink
    accounts = {sink: Account(last.total, last.given_up), **last.others}
    known = [
        *(last.transforms or (TransformVersion(""),)),
        TransformVersion(fingerprint, batch, last.offsets, accounts),
    ]
    while len(known) > 1 and (
        len(known) > TRANSFORM_VERSIONS_KEPT
        or len(json.dumps([t.to_json(sink) for t in known])) > TRANSFORM_VERSIONS_BYTES_MAX
    ):
        known[:2] = [replace(known[0], fingerprint=MIXED)]
    return tuple(known)
