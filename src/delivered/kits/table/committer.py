"""Committer of a sink whose decision makes the rows visible: all that is left to it is to delete staged files."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Collection, Iterable, Sequence
from pathlib import Path
from typing import TypeVar

from delivered.contract.sink import Committer
from delivered.model.errors import DeliveredError
from delivered.model.identity import Scope, Target, Work
from delivered.model.outcome import Ok, Outcome, Unknown
from delivered.model.work import Prepared

T = TypeVar("T")


class StagedFilesCommitter(Committer):
    """See `delivered.contract.sink.Committer`."""

    def __init__(self, scope: Scope) -> None:
        self._scope = scope

    @abstractmethod
    def _remove(self, prepared: Prepared) -> None:
        """Delete a participant's staged files, unless they are decided."""

    @abstractmethod
    def _remove_orphans(self, keep: Sequence[Prepared]) -> int:
        """Delete all other staged files of this sink that are undecided; return how many, or of how many writers."""

    @abstractmethod
    def _target(self) -> Target | None:
        """Where the rows are; None: nowhere yet."""

    def commit(self, work: Work, prepared: Prepared) -> Outcome[None]:
        """The decision has already made the rows visible."""
        del work, prepared
        return Ok(None)

    def abort(self, prepared: Prepared) -> Outcome[None]:
        return _outcome(lambda: self._remove(prepared)) if prepared.handle else Ok(None)

    def abort_orphans(self, keep: Sequence[Prepared]) -> Outcome[int]:
        return _outcome(lambda: self._remove_orphans([p for p in keep if p.handle]))

    def targets(self) -> dict[str, Target]:
        target = self._target()
        return {} if target is None else {self._scope.sink: target}

    def close(self) -> None:
        """Nothing to close."""


def unlink_others(paths: Iterable[Path], keep: Collection[str]) -> int:
    """Delete the files whose names are not in `keep`; return how many."""
    others = [path for path in paths if path.name not in keep]
    for path in others:
        path.unlink(missing_ok=True)
    return len(others)


def _outcome(work: Callable[[], T]) -> Outcome[T]:
    try:
        return Ok(work())
    except (DeliveredError, OSError) as error:
        return Unknown(str(error))
