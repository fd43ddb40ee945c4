"""What a saga is: named steps, each with what takes it back."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum, StrEnum
from importlib import import_module
from typing import Any, Final
from urllib.parse import quote

from delivered.model.errors import DeliveredError, Refused, UsageError
from delivered.model.limits import NAME_LENGTH_MAX, SAGA_STEPS_MAX

_NAME = re.compile(rf"[A-Za-z0-9._-]{{1,{NAME_LENGTH_MAX}}}")
LEASE_MARGIN_S = 5.0


class Verb(StrEnum):
    """What is called: a step's do, ask or undo."""

    DO = "do"
    ASK = "ask"
    UNDO = "undo"


@dataclass(frozen=True)
class Call:
    """What a step's functions are given.

    Attributes:
        saga, id, step: names of the saga and the step; the id that the saga was recorded with.
        verb: which of the step's functions this is.
        key: idempotency key of the step: the same in every try, also after a crash and in another process; the undo
            gets the key of its step.
        data: as given to `begin`.
        results: what the steps done so far returned, by name.
        attempt: from 1, counted across crashes.
    """

    saga: str
    id: str
    step: str
    verb: Verb
    key: str
    data: Any
    results: Mapping[str, Any]
    attempt: int


class Rejected(DeliveredError):
    """Raised by a `do`: it was not done, and never will be, so the saga turns back. Any other exception leaves open
    whether it was done."""

    def __init__(self, code: str, message: str | None = None, next_step: str | None = None) -> None:
        # Callers pass only the reason; unpickling passes three arguments.
        if message is None:
            super().__init__("SAGA_STEP_REJECTED", reason=code)
        else:
            super().__init__(code, message, next_step)


@dataclass(frozen=True)
class Done:
    """Answer of an `ask`: the step was done, with this result."""

    result: Any = None


class _NotNeeded(Enum):
    NO_UNDO = "no undo"


NO_UNDO: Final = _NotNeeded.NO_UNDO
"""`undo` of a step that needs none: it changes nothing that others see, or what it did may stay."""


@dataclass(frozen=True)
class Step:
    """
    Attributes:
        do: returns a JSON value, kept as the step's result. `Rejected` turns the saga back; after any other exception
            it is called again if the step takes the key or can be asked, else the saga turns back.
        undo: takes back what `do` did. Called at least once, also if it is open whether `do` was done: it must accept
            that there is nothing to take back, and that it was called before.
        takes_key: calling `do` again with the same key has no second effect.
        ask: whether `do` was done: `Done(result)`; None: it was not, and will not be any more.
        attempts_max: calls of `do`, and of `undo` until the saga is stuck.
        backoff_s: before the second attempt; doubles up to a minute.
        timeout_s: the longest that one call may take. After that, another worker may take the saga over.
    """

    name: str
    do: Callable[[Call], Any]
    undo: Callable[[Call], Any] | _NotNeeded | None = None
    takes_key: bool = False
    ask: Callable[[Call], Done | None] | None = None
    attempts_max: int = 5
    backoff_s: float = 1.0
    timeout_s: float = 60.0

    @property
    def repeatable(self) -> bool:
        """`do` may be called again with its key."""
        return self.takes_key or getattr(self.do, "takes_key", False)


@dataclass(frozen=True)
class Saga:
    """A saga's declaration.

    Raises:
        Refused: a step has no undo and does not say that it needs none.
        UsageError: names, counts or times out of bounds.
    """

    name: str
    steps: Sequence[Step] = field(default=())

    def __post_init__(self) -> None:
        names = [s.name for s in self.steps]
        if not 0 < len(names) <= SAGA_STEPS_MAX:
            raise _wrong(self.name, f"has {len(names)} steps; it must have 1 to {SAGA_STEPS_MAX}")
        for name in (self.name, *names):
            if not isinstance(name, str) or not _NAME.fullmatch(name):
                raise _wrong(self.name, f"uses the name {name!r}; names are {_NAME.pattern}")
        if len(set(names)) < len(names):
            raise _wrong(self.name, f"has two steps of one name: {', '.join(names)}")
        for step in self.steps:
            if step.undo is None:
                raise Refused("SAGA_UNDO_MISSING", step=step.name, name=self.name)
            if step.attempts_max < 1 or step.timeout_s <= 0 or step.backoff_s < 0:
                raise _wrong(
                    self.name,
                    f"has a step {step.name!r} with attempts_max {step.attempts_max!r}, timeout_s {step.timeout_s!r}, "
                    f"backoff_s {step.backoff_s!r}; at least 1, more than 0, and at least 0 are needed",
                )

    @property
    def signature(self) -> str:
        """Names of the steps: a worker claims only sagas that were recorded with the same ones."""
        return json.dumps([s.name for s in self.steps])

    @property
    def lease_s(self) -> float:
        return max(s.timeout_s for s in self.steps) + LEASE_MARGIN_S

    def key(self, id: str, step: Step) -> str:  # noqa: A002
        """The idempotency key of a step: printable ASCII."""
        return f"{self.name}/{quote(id, safe='')}/{step.name}"


def _wrong(name: object, what: str) -> UsageError:
    return UsageError("SAGA_DECLARATION", name=name, what=what)


def load(name: str) -> Saga:
    """A saga by the place of its declaration, `module:name`.

    Raises:
        UsageError: there is none.
    """
    module, _, attribute = name.partition(":")
    try:
        saga = getattr(import_module(module), attribute) if module and attribute else None
    except (ImportError, AttributeError) as error:
        raise UsageError("SAGA_NOT_FOUND.IMPORT", name=name, error=error) from error
    if not isinstance(saga, Saga):
        raise UsageError("SAGA_NOT_FOUND.NO_SAGA", name=name, saga_type=type(saga).__name__)
    return saga
