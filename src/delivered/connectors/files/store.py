"""The ledger next to the batches: renaming a batch's folder is the decision, and makes its rows visible.

Each claim has its own folder, where decisions are assembled and then renamed into place. A later claim renames that
folder away, so a decision in flight fails because its source is missing.
"""

from __future__ import annotations

import contextlib
import errno
import os
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from pyarrow import fs

from delivered.connectors.files import (
    RECORD,
    FilesOptions,
    Places,
    StagedFile,
    explained,
    failed,
    identity_file,
    numbered,
    take_away,
)
from delivered.kits.table import shard
from delivered.kits.table.shard import StagedFilesCommitter, unlink_others
from delivered.kits.table.store import ArchiveFiles, Store, make_folder, put, put_first, sync, write_new
from delivered.ledger import Change, Head, by_time, not_next, outdated, state_of
from delivered.model.errors import DeliveredError
from delivered.model.identity import OtherLedger, Scope, Target, Work, named_first
from delivered.model.limits import LEDGER_HISTORY_BATCHES, OWNERS_REMEMBERED
from delivered.model.work import STARTED, Decision, Failed, LedgerState, Ok, Outcome, Owner, Prepared, Started, Unknown

# Aborts staged files. Their rows become visible with the decision.


class FilesCommitter(StagedFilesCommitter):
    def __init__(self, options: FilesOptions, scope: Scope) -> None:
        super().__init__(scope)
        self._places = Places(options, scope)

    def was_committed(self, work: Work, prepared: Prepared) -> bool:  # noqa: ARG002 - a batch is one rename
        incarnation = work.scope.incarnation
        if (self._places.batch(incarnation, work.batch) / RECORD).exists():
            return True
        return max(numbered(self._places.decided(incarnation)), default=-1) >= work.batch

    def _remove(self, prepared: Prepared) -> None:
        """Decided files are no longer staged."""
        name = Path(StagedFile.of(prepared).file).name
        for folder in (self._places.root / "staged").glob("*"):
            (folder / name).unlink(missing_ok=True)

    def _remove_orphans(self, keep: Sequence[Prepared]) -> int:
        return unlink_others((self._places.root / "staged").glob("*/*"), {StagedFile.of(p).file for p in keep})

    def _target(self) -> Target | None:
        options = self._places.options
        try:
            return Target(f"folder {options.path}", identity_file(options).read_text())
        except FileNotFoundError:
            return None
        except OSError as error:
            raise failed(options, error) from error


class FilesStore:
    """See `delivered.ledger.Store`."""

    def __init__(self, options: FilesOptions, scope: Scope) -> None:
        self._options = options
        self._scope = scope
        self._places = Places(options, scope)

    @property
    def where(self) -> str:
        return f"in {self._options.path!r}"

    def read(self) -> LedgerState:
        with explained(self._options):
            return self._state()

    def peek(self) -> LedgerState:
        return self.read()

    def take(self, successor: Callable[[Head], Owner]) -> Outcome[int]:
        """
        1  create a folder for this claim
        2  link its owner under the next number: the first to do so wins
        3  rename away the folders of all earlier claims   <- from here on they are fenced
        """
        with explained(self._options):
            head, _ = self._head()
            epoch = head.epoch + 1
            if not self._link(successor(head), epoch):
                return Failed("other drivers keep claiming it")
            self._fence(epoch)
            self._forget()
        return Ok(epoch)

    def write(self, rule: Callable[[Head], Change | None]) -> Outcome[None]:
        """One rename out of the folder of the claim that the rule saw. On a local disk every outcome is known.

        1  call the rule
        2  move the staged file of each participant to one folder     <- crash points of commit.apply
        3  write the record to it; make all of it durable
        4  rename the folder to its final name                        <- from here on the batch counts, and is visible
        5  copy the record, in case the folder is deleted later; delete old records

        A batch without rows has no folder: only its record is renamed. So is a later revision, which replaces the copy.
        """
        with explained(self._options):
            head, work = self._head()
            change = rule(head)
        if change is None:
            return Ok(None)
        try:
            if change.started is not None:
                draft, target = self._draft_started(change.started, work)
            if change.decision is not None:
                draft, target = self._draft_decision(change.decision, change.move, work)
            draft.rename(target)  # THE line that decides a batch in this sink
        except (DeliveredError, OSError) as error:
            if not work.is_dir():  # renamed away by a later claim: nothing was or will be changed
                rule(self._head()[0])
            if isinstance(error, DeliveredError):
                raise
            if error.errno in (errno.ENOTEMPTY, errno.EEXIST):
                return Failed(f"another writer has created this batch: {error}")
            return Failed(str(failed(self._options, error)))
        try:
            sync([target.parent])
        except OSError as error:
            return Unknown(f"it was committed but could not be made durable: {error}")
        if change.decision is not None:
            with contextlib.suppress(OSError):
                self._copy(change.decision)
                self._forget_old(change.decision.batch)
        return Ok(None)

    def history(self) -> Iterator[Decision]:
        incarnation = self._scope.incarnation
        last = self._last(incarnation)
        for _, path in sorted(numbered(self._places.decided(incarnation)).items()):
            decision = Decision.from_json(path.read_bytes())
            yield decision
            if last is not None and decision.batch == last.batch:
                return
        if last is not None:
            yield last

    def others(self) -> list[OtherLedger]:
        ledgers = []
        for root in self._places.root.parent.parent.glob("p-*/s-*"):
            pipeline, sink = root.parent.name.removeprefix("p-"), root.name.removeprefix("s-")
            theirs = Places(self._options, Scope(pipeline, sink, self._scope.incarnation))
            if theirs.root != self._places.root:
                incarnation = self._scope.incarnation
                holds = bool(numbered(theirs.decided(incarnation))) or theirs.started(incarnation).exists()
                ledgers.append(OtherLedger(pipeline, sink, holds))
        return named_first(ledgers)

    def last_seal(self, sink: str) -> str | None:
        with explained(self._options):
            seals = numbered(self._sealed(sink))
            return seals[max(seals)].read_bytes().decode() if seals else None

    def seals(self, sink: str, first: int = 0) -> Iterator[str]:
        with explained(self._options):
            for number, path in sorted(numbered(self._sealed(sink)).items()):
                if number >= first:
                    yield path.read_bytes().decode()

    def add_seal(self, sink: str, number: int, text: str) -> Outcome[None]:
        """Links a complete file to its name, which fails if the name exists."""
        path = self._sealed(sink) / f"{number:010d}.json"
        try:
            last = max(numbered(path.parent), default=-1)
            if number > last + 1:
                return not_next(sink, number, last)
            if put_first(path, text.encode()) or path.read_bytes() == text.encode():
                return Ok(None)
        except OSError as error:
            with contextlib.suppress(OSError):
                if path.exists():
                    return Unknown(f"it may not be durable: {error}")
            raise failed(self._options, error) from error
        return not_next(sink, number, max(number, last))

    def close(self) -> None:
        """Nothing to close."""

    def _sealed(self, sink: str) -> Path:
        return Places(self._options, replace(self._scope, sink=sink)).root / "seals"

    def _head(self) -> tuple[Head, Path]:
        """The head, and the folder of the claim."""
        owner, epoch, work = self._owner()
        last = self._last(self._scope.incarnation)
        head = Head(
            owner,
            epoch,
            None if last is None else last.batch,
            lambda: last,
            lambda: self._started(self._scope.incarnation),
        )
        return head, work

    def _link(self, owner: Owner, epoch: int) -> bool:
        owners, claims = make_folder(self._places.root / "owner"), make_folder(self._places.root / "claims")
        work = claims / f"{epoch:010d}-{uuid.uuid4().hex}"
        work.mkdir()
        sync([claims])
        draft = owners / f".{uuid.uuid4().hex}"
        write_new(draft, owner.to_json(work=work.name).encode())
        try:
            os.link(draft, owners / f"{epoch:010d}.json")
        except FileExistsError:
            take_away(work)
            return False
        finally:
            draft.unlink()
        sync([owners])
        return True

    def _fence(self, epoch: int) -> None:
        """Rename away the folders of earlier claims, with all their writes in flight."""
        claims, removed = self._places.root / "claims", make_folder(self._places.root / "gone")
        for path in list(claims.iterdir()):
            if int(path.name.partition("-")[0]) < epoch:
                with contextlib.suppress(FileNotFoundError):
                    path.rename(removed / f"{path.name}.{uuid.uuid4().hex}")
        sync([claims])
        take_away(removed)

    def _draft_started(self, started: Started, work: Path) -> tuple[Path, Path]:
        """Source, durable in the folder of the claim, and target of the rename."""
        target = self._places.started(self._scope.incarnation)
        make_folder(target.parent)
        draft = work / f"started-{uuid.uuid4().hex}"
        write_new(draft, started.to_json().encode())
        return draft, target

    def _draft_decision(self, decision: Decision, move: Sequence[Prepared], work: Path) -> tuple[Path, Path]:
        """As `_draft_started`. Raises InvariantBroken: a staged file is missing, or differs from what was prepared."""
        incarnation, text = self._scope.incarnation, decision.to_json().encode()
        records = make_folder(self._places.decided(incarnation))
        last = self._last(incarnation)
        if last is not None:
            self._copy(last)
        draft = work / f"{decision.batch}-{uuid.uuid4().hex}"
        if not move:
            draft = draft.with_suffix(".json")
            write_new(draft, text)
            return draft, records / f"{decision.batch:010d}.json"
        draft.mkdir()
        self._take_staged(decision, move, draft)
        write_new(draft / RECORD, text)
        sync([draft])
        return draft, self._places.batch(incarnation, decision.batch)

    def _take_staged(self, decision: Decision, move: Sequence[Prepared], folder: Path) -> None:
        """Move staged files to the batch's folder, after checking that they exist and are complete."""
        for prepared in move:
            with shard.moving(decision, prepared):
                handle = StagedFile.of(prepared)
                staged = self._places.staged(self._scope.incarnation) / Path(handle.file).name
                there = {str(staged): staged.stat().st_size} if staged.exists() else {}
                shard.check_complete(there, str(staged), handle.bytes)
                shard.check_count(prepared, handle.rows)
                staged.rename(folder / f"{prepared.shard:05d}.{self._options.format}")

    def _state(self) -> LedgerState:
        owner, epoch, _ = self._owner()
        decided, started = self._places.root / "decided", self._places.root / STARTED
        incarnations = {self._scope.incarnation, *(p.name for p in (decided.iterdir() if decided.is_dir() else ()))}
        decisions = (self._last(incarnation) for incarnation in incarnations)
        # The file system's clock orders only what an earlier release began: later ones have sequences.
        oldest_first = [path.stem for path in sorted(started.glob("*.json"), key=lambda p: p.stat().st_mtime)]
        known = ((incarnation, self._started(incarnation)) for incarnation in oldest_first)
        return state_of(
            self._scope,
            owner,
            epoch,
            by_time(d for d in decisions if d is not None),
            {i: b for i, b in known if b is not None},
            lambda incarnation: self._archive.read().find(incarnation),
        )

    @property
    def _archive(self) -> ArchiveFiles:
        root = self._places.root
        return ArchiveFiles(Store(fs.SubTreeFileSystem(str(root), fs.LocalFileSystem()), root), "archive")

    def _owner(self) -> tuple[Owner | None, int, Path]:
        """The last owner, its claim and the claim's folder; 0: none."""
        for epoch, path in sorted(numbered(self._places.root / "owner").items(), reverse=True):
            owner, more = Owner.from_json(path.read_bytes())
            return owner, epoch, self._places.root / "claims" / more["work"]
        return None, 0, self._places.root / "claims" / "none"

    def _started(self, incarnation: str) -> Started | None:
        path = self._places.started(incarnation)
        return Started.from_json(path.read_bytes()) if path.exists() else None

    def _last(self, incarnation: str) -> Decision | None:
        """The newest record; that of the last batch may only be in the batch's folder."""
        copies = numbered(self._places.decided(incarnation))
        newest = max(copies, default=-1)
        record = self._places.batch(incarnation, newest + 1) / RECORD
        if record.exists():
            decision = Decision.from_json(record.read_bytes())
            own = (decision.scope.pipeline, decision.scope.sink)
            if own == (self._scope.pipeline, self._scope.sink):
                return decision
        return Decision.from_json(copies[newest].read_bytes()) if copies else None

    def _copy(self, decision: Decision) -> None:
        path = self._places.decided(decision.scope.incarnation) / f"{decision.batch:010d}.json"
        if not path.exists():
            put(path, decision.to_json().encode())

    def _forget_old(self, batch: int) -> None:
        old = self._places.decided(self._scope.incarnation) / f"{batch - LEDGER_HISTORY_BATCHES:010d}.json"
        old.unlink(missing_ok=True)

    def _forget(self) -> None:
        """Keep only the newest decision of other incarnations, archived entries of very old ones, and some owners."""
        state = self._state()
        old = outdated(state)
        self._archive.add(old.entries)
        for incarnation in old.incarnations:
            take_away(self._places.decided(incarnation))
            self._places.started(incarnation).unlink(missing_ok=True)
        for decision in state.earlier:
            for batch, path in numbered(self._places.decided(decision.scope.incarnation)).items():
                if batch < decision.batch:
                    path.unlink(missing_ok=True)
        for _, path in sorted(numbered(self._places.root / "owner").items())[:-OWNERS_REMEMBERED]:
            path.unlink(missing_ok=True)
