"""What a preflight check says of the live system."""

from __future__ import annotations

from dataclasses import dataclass

from delivered.model.errors import DeliveredError
from delivered.model.guarantee import Guarantee


@dataclass(frozen=True)
class Finding:
    """What a preflight check saw at the live system.

    Attributes:
        refuses: the pipeline must not start with this; code: as in an error, without the prefix.
        only: the guarantee that it stands against; None: every one. transient: a server is away, and may come back.
    """

    code: str
    message: str
    refuses: bool
    next_step: str | None = None
    only: Guarantee | None = None
    transient: bool = False

    @classmethod
    def refusal(cls, why: DeliveredError) -> Finding:
        """What a check ran into, as a finding that refuses."""
        return cls(why.code.removeprefix("DELIVERED_"), why.message, True, why.next_step, None, why.may_come_back)
