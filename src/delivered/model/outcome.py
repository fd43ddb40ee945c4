"""The outcome of a call that changes something outside: it worked, it did not, or it is unknown."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic, TypeVar

T = TypeVar("T")


@dataclass(frozen=True)
class Ok(Generic[T]):
    """The change was made."""

    value: T


@dataclass(frozen=True)
class Failed:
    """The change was not made, and will not be later."""

    reason: str


@dataclass(frozen=True)
class Unknown:
    """The change may have been made, or still be made. Fence first, then check; never resend blindly."""

    reason: str


Outcome = Ok[T] | Failed | Unknown
