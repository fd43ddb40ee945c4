"""Keys of a ledger's records in its topic.

    partition 0   ["owner", pipeline, sink]                  the ledger's owner
                  ["last", pipeline, sink, incarnation]      its newest decision
                  ["begun", pipeline, sink, incarnation]     its newest begun batch (at_most_once)
                  ["archive", pipeline, sink, n]             summaries of old incarnations: 25 bytes each
    partition 1   ["kept", pipeline, sink, incarnation, n]   decisions for the audit, n = batch % 1000
    partition 2.. ["marker", pipeline, sink, shard]          written by tasks: see markers.py

Keys of an earlier release (format 1) lack the pipeline; several pipelines that share a topic may have written to them.
They stay where they are, are read, and are never written again:

- A decision counts for the pipeline that it names. An owner, a begun batch and an archive name none, and count for
  every pipeline of that sink: at worst, a start is refused that need not be.
- A claim replaces the old owner by one that such a release refuses (`FORMAT_NEWER`), as it would not see the new keys.
"""

from __future__ import annotations

import json
from dataclasses import dataclass

from delivered.model.identity import Scope
from delivered.model.work import Owner

_PARTS = {"owner": 3, "last": 4, "begun": 4, "archive": 4, "kept": 5}


@dataclass(frozen=True)
class Key:
    """
    Attributes:
        kind: "owner", ...; of a record that this release does not know, too.
        pipeline: None: an earlier release wrote it.
        rest: incarnation or number, or both.
    """

    kind: str
    pipeline: str | None
    sink: str
    rest: tuple[str | int, ...]

    @classmethod
    def parse(cls, raw: bytes) -> Key:
        try:
            kind, *parts = json.loads(raw)
            pipeline = parts.pop(0) if len(parts) + 1 == _PARTS.get(kind) else None
            return cls(kind, pipeline, parts[0], tuple(parts[1:]))
        except (ValueError, TypeError, IndexError, RecursionError):
            return cls("", None, "", ())  # anybody may write to a topic


class Keys:
    """Keys of one pipeline and sink."""

    def __init__(self, scope: Scope) -> None:
        self._scope = scope

    def key(self, kind: str, *rest: str | int) -> bytes:
        return json.dumps([kind, self._scope.pipeline, self._scope.sink, *rest], separators=(",", ":")).encode()

    def old(self, kind: str, *rest: str | int) -> bytes:
        """As an earlier release wrote it."""
        return json.dumps([kind, self._scope.sink, *rest], separators=(",", ":")).encode()

    def one(self, kind: str, *rest: str | int) -> tuple[bytes, ...]:
        return (self.key(kind, *rest),)

    def both(self, kind: str, *rest: str | int) -> tuple[bytes, ...]:
        return self.key(kind, *rest), self.old(kind, *rest)

    def holds(self, key: Key) -> bool:
        """Whether a record may be this pipeline's and sink's."""
        return key.sink == self._scope.sink and key.pipeline in (None, self._scope.pipeline)


MOVED = {"moved": True}
"""Field of an owner under an earlier release's key that only stops such a release."""


def is_moved(owner: bytes) -> bool:
    return "moved" in Owner.from_json(owner)[1]
