"""A writer's handle on what it prepared: stored as JSON in the decision, read back by the committer."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, is_dataclass
from typing import Any, ClassVar, Self, get_args, get_origin, get_type_hints

from delivered.model import record_format
from delivered.model.fingerprint import Fingerprint
from delivered.model.identity import Work


@dataclass(frozen=True)
class Handle:
    """All that another process needs to apply or abort a participant; a connector subclasses it as a frozen dataclass.

    Its fields are JSON values, tuples, and frozen dataclasses of these. Default values are not stored.
    """

    FORMAT: ClassVar[int] = 1
    """Version of the fields. Increment it when older code can no longer read them; 0: stored before it existed."""

    def to_json(self) -> dict[str, Any]:
        """Plain JSON values, as `json.loads` returns them."""
        stored = {f.name: v for f in fields(self) if (v := getattr(self, f.name)) != f.default}
        plain: dict[str, Any] = json.loads(json.dumps({record_format.KEY: self.FORMAT, **stored}, default=asdict))
        return plain

    @classmethod
    def of(cls, prepared: Prepared) -> Self:
        """
        Raises:
            Refused: a later version of this package prepared it.
        """
        return cls.from_json(prepared.handle)

    @classmethod
    def from_json(cls, stored: Mapping[str, Any]) -> Self:
        record_format.check_format(stored.get(record_format.KEY, 0), f"a {cls.__name__}", cls.FORMAT)
        made: Self = _typed(cls, stored)
        return made

    def names(self, prepared: Prepared) -> bool:
        """Whether this is the participant's handle."""
        return {**prepared.handle, record_format.KEY: self.FORMAT} == self.to_json()


@dataclass(frozen=True)
class Promise:
    """What `Writer.prepare` returns.

    Attributes:
        handle: None: there is nothing to apply or abort.
        given_up: reason -> records that at_most_once sent without acknowledgement; they may have arrived.
    """

    handle: Handle | None = None
    given_up: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Prepared:
    """A prepared shard at one sink, or what was sent there.

    Attributes:
        fingerprint: of the rows as passed to the sink.
        handle: the connector's `Handle` as JSON. Identifies the rows of this writer: Spark restarts attempts at 0 when
            a batch or stage reruns, so two writers may share one `Work`. Empty if there is nothing to apply or abort.
        given_up: as in `Promise`.
        sink: name of the sink.
    """

    shard: int
    attempt: int
    fingerprint: Fingerprint
    handle: Mapping[str, Any] = field(default_factory=dict)
    given_up: Mapping[str, int] = field(default_factory=dict)
    sink: str = field(kw_only=True)

    @classmethod
    def of(cls, work: Work, fingerprint: Fingerprint, promise: Promise) -> Prepared:
        handle = {} if promise.handle is None else promise.handle.to_json()
        return cls(work.shard, work.attempt, fingerprint, handle, promise.given_up, sink=work.scope.sink)

    def to_json(self, ledger_sink: str) -> dict[str, Any]:
        """A record leaves the name of the ledger's sink empty."""
        return {
            "shard": self.shard,
            "attempt": self.attempt,
            "fingerprint": str(self.fingerprint),
            "handle": dict(self.handle),
            **({"given_up": dict(self.given_up)} if self.given_up else {}),
            **({"sink": self.sink} if self.sink != ledger_sink else {}),
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any], ledger_sink: str) -> Prepared:
        handle, given_up = dict(data["handle"]), dict(data.get("given_up", {}))
        if "given_up" in handle:  # stored so before it had a field
            handle, given_up = {}, handle.get("reasons") or {"unknown": handle["given_up"]}
        return cls(
            int(data["shard"]),
            int(data["attempt"]),
            Fingerprint.parse(data["fingerprint"]),
            handle,
            given_up,
            sink=str(data.get("sink", ledger_sink)),
        )


def _typed(kind: Any, value: Any) -> Any:
    """A JSON value as the type of its field."""
    if is_dataclass(kind) and isinstance(kind, type):
        hints = get_type_hints(kind)
        return kind(**{f.name: _typed(hints[f.name], value[f.name]) for f in fields(kind) if f.name in value})
    if get_origin(kind) is tuple:
        return tuple(_typed(get_args(kind)[0], v) for v in value)
    return value
