"""Every error a user can meet.

    DeliveredError
     +- UsageError               the request itself is wrong (exit 2)
     |   +- Refused              the request is understood and cannot be had
     |   +- MissingExtra         a client library is not installed
     +- Unreachable              a server did not answer, or turned the credentials away
     +- BadRecord                one record cannot be written, for itself
     +- InvariantBroken          something that must never happen did; the query stops, nothing is skipped
     |   +- Fenced               another driver owns the ledger now
     |   +- LedgerAhead          the ledger knows batches that the checkpoint does not
     |   +- LedgerBehind         the checkpoint knows batches that the ledger does not
     |   +- TargetChanged        what the sink writes to was dropped and made anew
     |   +- ReplayDiffers        a batch run again gave other rows
     |   +- PromiseBroken        a decided participant can no longer be applied
     +- OutcomeUnknown           it cannot be told whether a change is in (exit 3)

The message starts with a code in Spark's style, because the driver sees a worker's error only as text.
"""

from __future__ import annotations

from typing import Any


class DeliveredError(Exception):
    """Base of all errors of this package.

    Args:
        code: upper-case words, without the prefix `DELIVERED_`.
        message: full sentences: what happened, the value, the limit.
        next_step: what to run or change next, or None if there is nothing to do.
    """

    exit_code = 1
    may_come_back = False
    """A server is away, so that the same call may succeed later."""

    def __init__(self, code: str, message: str, next_step: str | None = None) -> None:
        self.code = f"DELIVERED_{code}"
        self.message = message
        self.next_step = next_step
        super().__init__(code, message, next_step)

    def __str__(self) -> str:
        tail = f" Next: {self.next_step}" if self.next_step else ""
        return f"[{self.code}] {self.message}{tail}"

    def __reduce__(self) -> tuple[Any, ...]:
        return (type(self), self.args)


class UsageError(DeliveredError):
    """The request itself is wrong."""

    exit_code = 2


class Refused(UsageError):
    """The request is understood, and cannot be had. The message says why; `next_step` what can."""


class MissingExtra(UsageError):
    """A client library is not installed."""

    def __init__(self, code: str, message: str | None = None, next_step: str | None = None) -> None:
        # Called with the extra's name alone by user code, with three arguments when unpickled.
        if message is None:
            extra = code
            code = "EXTRA_MISSING"
            message = f"The client library for {extra} is not installed."
            next_step = f'pip install "delivered[{extra}]"'
        super().__init__(code, message, next_step)


_AWAY = frozenset(
    f"DELIVERED_{system}_{what}"
    for system in ("ACTIVEMQ", "KAFKA", "MYSQL", "POSTGRES", "PULSAR", "RABBITMQ", "ROCKETMQ")
    for what in ("UNREACHABLE", "NO_ANSWER")
)


class Unreachable(DeliveredError):
    """A server did not answer in time, or turned the credentials away."""

    def __init__(self, code: str, message: str, next_step: str | None = None) -> None:
        super().__init__(code, message, next_step)
        self.may_come_back = self.code in _AWAY  # not for wrong credentials or paths


class BadRecord(DeliveredError):
    """One record cannot be written, for itself: too large, no topic, a type the sink does not know."""


class InvariantBroken(DeliveredError):
    """Something that must never happen did. The query stops; nothing is skipped."""


class Fenced(InvariantBroken):
    """Another driver owns the ledger now."""


class LedgerAhead(InvariantBroken):
    """The ledger knows batches that the checkpoint does not: an older checkpoint was put back."""


class LedgerBehind(InvariantBroken):
    """The checkpoint knows batches that the ledger does not: the sink or its ledger was put back."""


class TargetChanged(InvariantBroken):
    """What the sink writes to was dropped and made anew: what was delivered before is not in it."""


class ReplayDiffers(InvariantBroken):
    """A batch that ran again gave other rows than the ones that were decided."""


class PromiseBroken(InvariantBroken):
    """A decided participant can no longer be applied; its shard must be written again."""


class OutcomeUnknown(DeliveredError):
    """It cannot be told whether a change is in."""

    exit_code = 3
