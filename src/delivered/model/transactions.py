"""What stays open at a sink until somebody ends it. A committer that offers it is a `HoldsTransactions`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

from delivered.model.outcome import Outcome


class OpenTransaction(Protocol):
    """One transaction at a sink that is not over, for a person and for the audit."""

    @property
    def transactional_id(self) -> str: ...

    @property
    def state(self) -> str:
        """In the system's own words."""

    @property
    def participant(self) -> dict[str, Any]:
        """The handle that names it in a decision, if one does."""

    @property
    def targets(self) -> tuple[str, ...]:
        """Where its rows go."""

    def age_s(self) -> float | None: ...


@runtime_checkable
class HoldsTransactions(Protocol):
    """Also offered by a `Committer` whose participants stay open in the system until somebody ends them."""

    def open_transactions(self) -> Sequence[OpenTransaction]:
        """Every one of this sink of this pipeline, of any incarnation, oldest first. Raises Unreachable."""

    def end_by_id(self, transactional_id: str, commit: bool) -> Outcome[None]:
        """Commit or abort one by hand.

        Raises UsageError if the id belongs to somebody else, or nothing is open under it.
        """
