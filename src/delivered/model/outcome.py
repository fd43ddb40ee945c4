"""What a call that changes the outside may have done: it worked, it did not, or nobody knows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic, TypeVar

T = TypeVar("T")


@dataclass(frozen=True)
class Ok(Generic[T]):
    """The change is in."""

    value: T


@dataclass(frozen=True)
class Failed:
    """The change is not in, and will not get in later."""

    reason: str


@dataclass(frozen=True)
class Unknown:
    """The change may be in, or may still get in. Fence first, then look; never send again blindly."""

    reason: str


Outcome = Ok[T] | Failed | Unknown
