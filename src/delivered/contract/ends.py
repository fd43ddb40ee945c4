"""A transaction whose end its system confirmed and then lost."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

from delivered.contract.powers import OpenTransaction


@runtime_checkable
class EndLost(OpenTransaction, Protocol):
    """A transaction that its system reports as ended, and whose rows it still hides."""

    @property
    def committed(self) -> bool | None:
        """How it ended; None: the system does not know any more."""
