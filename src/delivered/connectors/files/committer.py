"""Aborts staged files. Their rows become visible with the decision."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from delivered.connectors.files.disk import RECORD, Places, StagedFile, failed, identity_file, numbered
from delivered.connectors.files.options import FilesOptions
from delivered.contract.sink import Committer
from delivered.model.identity import Scope, Target, Work
from delivered.model.outcome import Ok, Outcome, Unknown
from delivered.model.prepared import Prepared


class FilesCommitter(Committer):
    """See `delivered.contract.sink.Committer`."""

    def __init__(self, options: FilesOptions, scope: Scope) -> None:
        self._places = Places(options, scope)

    def commit(self, work: Work, prepared: Prepared) -> Outcome[None]:
        """Nothing to do: the decision has already moved the staged file and made its rows visible."""
        del work, prepared
        return Ok(None)

    def was_committed(self, work: Work, prepared: Prepared) -> bool:  # noqa: ARG002 - a batch is one rename
        incarnation = work.scope.incarnation
        if (self._places.batch(incarnation, work.batch) / RECORD).exists():
            return True
        return max(numbered(self._places.decided(incarnation)), default=-1) >= work.batch

    def abort(self, prepared: Prepared) -> Outcome[None]:
        """Only deletes staged files: decided files are no longer staged."""
        if not prepared.handle:
            return Ok(None)
        try:
            for folder in (self._places.root / "staged").glob("*"):
                (folder / Path(StagedFile.of(prepared).file).name).unlink(missing_ok=True)
        except OSError as error:
            return Unknown(str(error))
        return Ok(None)

    def abort_orphans(self, keep: Sequence[Prepared]) -> Outcome[int]:
        kept = {StagedFile.of(p).file for p in keep if p.handle}
        count = 0
        try:
            for path in (self._places.root / "staged").glob("*/*"):
                if path.name not in kept:
                    path.unlink(missing_ok=True)
                    count += 1
        except OSError as error:
            return Unknown(str(error))
        return Ok(count)

    def targets(self) -> dict[str, Target]:
        """See `delivered.contract.sink.Committer`."""
        options = self._places.options
        try:
            known = identity_file(options).read_text()
        except FileNotFoundError:
            return {}
        except OSError as error:
            raise failed(options, error) from error
        return {self._places.scope.sink: Target(f"folder {options.path}", known)}

    def close(self) -> None:
        """Nothing to close."""
