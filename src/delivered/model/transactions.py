"""Transactions that stay open at a sink until they are ended; `HoldsTransactions` is the committer that has them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

from delivered.model.outcome import Outcome


class OpenTransaction(Protocol):
    """One open transaction at a sink, for display and for the audit."""

    @property
    def transactional_id(self) -> str: ...

    @property
    def state(self) -> str:
        """In the system's own terms."""

    @property
    def participant(self) -> dict[str, Any]:
        """The handle that names it in a decision, if one does."""

    @property
    def targets(self) -> tuple[str, ...]:
        """Targets of its rows."""

    def age_s(self) -> float | None: ...


@runtime_checkable
class HoldsTransactions(Protocol):
    """Implemented by a `Committer` whose participants stay open in the system until they are ended."""

    def open_transactions(self) -> Sequence[OpenTransaction]:
        """Those of this pipeline and sink, of any incarnation, oldest first. Raises Unreachable."""

    def end_by_id(self, transactional_id: str, commit: bool) -> Outcome[None]:
        """Commit or abort one manually.

        Raises UsageError if the id is not ours, or has no open transaction.
        """
