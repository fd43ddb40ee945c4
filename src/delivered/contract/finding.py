"""Findings of preflight checks."""

from __future__ import annotations

from dataclasses import dataclass

from delivered.model.catalogue import texts
from delivered.model.errors import DeliveredError
from delivered.model.guarantee import Guarantee


@dataclass(frozen=True)
class Finding:
    """What a preflight check found at the live system.

    Attributes:
        code: as in an error, without the prefix.
        refuses: the pipeline must not start.
        only: the guarantee it rules out; None: all of them.
        transient: a server is unreachable and may come back.
    """

    code: str
    message: str
    refuses: bool
    next_step: str | None = None
    only: Guarantee | None = None
    transient: bool = False

    @classmethod
    def build(
        cls, code: str, *, refuses: bool, only: Guarantee | None = None, transient: bool = False, **values: object
    ) -> Finding:
        """With the texts of the catalogue; `code` with its condition."""
        message, next_step = texts(code, values)
        return cls(code.partition(".")[0], message, refuses, next_step, only, transient)

    @classmethod
    def refusal(cls, why: DeliveredError) -> Finding:
        return cls(why.code.removeprefix("DELIVERED_"), why.message, True, why.next_step, None, why.may_come_back)
