"""Executor side of tables of files: writes files that are committed later (exactly_once), or at once."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Protocol

import pyarrow as pa

from delivered.model.errors import InvariantBroken, OutcomeUnknown
from delivered.model.fingerprint import Fingerprint
from delivered.model.guarantee import Guarantee
from delivered.model.identity import Work
from delivered.model.outcome import Failed, Ok, Outcome, Unknown
from delivered.model.prepared import Handle, Promise


class ShardFiles(Protocol):
    """The files of one shard. Used by one thread, once."""

    def write(self, batch: pa.RecordBatch) -> None:
        """Write rows, at least one."""

    def finish(self) -> int:
        """Close all files and make them durable; return their number of rows."""

    def handle(self) -> Handle | None:
        """After `finish`: what the driver needs to commit the files. None: there are no files."""

    def check(self) -> None:
        """After `finish`: raise if the table cannot accept the files."""

    def commit(self) -> Outcome[None]:
        """After `check`: commit the files now. Called once."""

    def discard(self) -> None:
        """Delete what was written. Never raises."""


class StagingWriter:
    """exactly_once: files stay invisible until the driver commits them."""

    def __init__(self, work: Work, files: ShardFiles) -> None:
        self._work = work
        self._files = files

    def stage(self, batch: pa.RecordBatch) -> None:
        if batch.num_rows:
            with while_staging(self._work):
                self._files.write(batch)

    def prepare(self, fingerprint: Fingerprint) -> Promise:
        self._finish(fingerprint)
        return Promise(self._files.handle())

    def abort(self) -> None:
        self._files.discard()

    def _finish(self, fingerprint: Fingerprint) -> int:
        with while_staging(self._work):
            rows = self._files.finish()
        if rows != fingerprint.count:
            raise InvariantBroken(
                "ROWS_DIFFER",
                f"Shard {self._work.shard} of batch {self._work.batch}: its files have {rows} rows, but its "
                f"fingerprint counts {fingerprint.count}. Nothing of the shard is visible.",
                next_step="start the pipeline again; the batch runs again",
            )
        return rows


class DirectWriter(StagingWriter):
    """at_least_once, at_most_once: the task commits its own files."""

    def __init__(self, work: Work, guarantee: Guarantee, files: ShardFiles) -> None:
        super().__init__(work, files)
        self._guarantee = guarantee
        self._committed = False

    def prepare(self, fingerprint: Fingerprint) -> Promise:
        if not self._finish(fingerprint):
            return Promise()
        self._files.check()
        self._committed = True  # the files may be visible from here on, and must not be deleted
        match self._files.commit():
            case Ok():
                return Promise()
            case Failed(reason):
                self._committed = False
                raise InvariantBroken(
                    "COMMIT_FAILED",
                    f"Shard {self._work.shard} of batch {self._work.batch} was not committed: {reason}. Nothing of it "
                    "is visible.",
                    next_step="start the pipeline again; the batch runs again",
                )
            case Unknown(reason):
                if self._guarantee is Guarantee.AT_MOST_ONCE:
                    return Promise(given_up={"unknown": fingerprint.count})
                raise OutcomeUnknown(
                    "COMMIT_UNKNOWN",
                    f"It is unknown whether shard {self._work.shard} of batch {self._work.batch} is visible: "
                    f"{reason}. It is written again, and may then be duplicated.",
                    next_step="start the pipeline again once the store responds",
                )

    def abort(self) -> None:
        if not self._committed:
            self._files.discard()


def shard_writer(work: Work, guarantee: Guarantee, files: ShardFiles) -> StagingWriter:
    if guarantee is Guarantee.EXACTLY_ONCE:
        return StagingWriter(work, files)
    return DirectWriter(work, guarantee, files)


@contextlib.contextmanager
def while_staging(work: Work) -> Iterator[None]:
    """Raises InvariantBroken if a file of this task is gone."""
    try:
        yield
    except FileNotFoundError:
        raise InvariantBroken(
            "STAGED_FILE_GONE",
            f"A file of shard {work.shard} of batch {work.batch} was deleted while the task wrote it: a later start of "
            "the pipeline cleaned up after this one. Nothing of the shard is visible.",
            next_step="nothing, if the later start is running; otherwise start the pipeline again",
        ) from None
