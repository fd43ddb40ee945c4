"""The ledger beside the batches: the rename of a batch's folder is the decision, and makes its rows visible.

One owner at a time. A claim has a folder of its own, in which its decisions are put together, and out of which they are
renamed. A later claim renames that folder away: what was under way in it has no source any more, and fails.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import json
import os
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

from pyarrow import fs

from delivered.connectors.files.disk import RECORD, Places, failed, numbered, take_away
from delivered.connectors.files.options import FilesOptions
from delivered.kits.table.archive import ArchiveFiles
from delivered.kits.table.durable import make_folder, put, sync, write_new
from delivered.kits.table.store import Store
from delivered.model.errors import DeliveredError, Fenced, InvariantBroken, Unreachable
from delivered.model.guarantee import Guarantee
from delivered.model.identity import OtherLedger, Scope, named_first
from delivered.model.limits import CONNECT_TIMEOUT_S, LEDGER_HISTORY_BATCHES, LEDGER_INCARNATIONS, OWNERS_REMEMBERED
from delivered.model.outcome import Failed, Ok, Outcome
from delivered.model.step import Moment, StepId, reach
from delivered.model.work import Begun, Decision, LedgerState, Owner, Prepared


class FilesLedger:
    """See `delivered.contract.sink.Ledger`. Works by one claim; a later one, also of the same owner, voids it."""

    def __init__(self, options: FilesOptions, scope: Scope) -> None:
        self._options = options
        self._scope = scope
        self._places = Places(options, scope)
        self._claimed: tuple[str, int, Path] | None = None

    def claim(self, owner: Owner) -> LedgerState:
        """
        1  a folder for this claim
        2  its owner, under the next number: whoever links it first has it
        3  rename away the folders of all claims before   <- from here on nothing of theirs gets in
        """
        deadline = time.monotonic() + CONNECT_TIMEOUT_S
        try:
            while not self._claim_once(owner):
                if time.monotonic() > deadline:
                    raise Unreachable(
                        "LEDGER_CONTENDED",
                        f"The ledger in {str(self._places.root)!r} could not be claimed within "
                        f"{CONNECT_TIMEOUT_S:.0f} s: others claim it again and again.",
                        next_step="see which drivers of this pipeline run; then start again",
                    )
            self._fence(self._claimed[1] if self._claimed else 0)
            self._forget()
            state = self._state()
            if self._claimed is None or state.epoch != self._claimed[1]:
                raise self._fenced(owner.id, state.owner)  # by a claim that came right behind
            return state
        except OSError as error:
            raise failed(self._options, error) from error

    def resume(self, owner_id: str) -> LedgerState:
        state = self.look()
        found = self._owner()
        if found is None or found[0].id != owner_id or state.epoch != found[1]:
            raise self._fenced(owner_id, found[0] if found else None)
        self._claimed = (owner_id, found[1], found[2])
        return state

    def look(self) -> LedgerState:
        try:
            return self._state()
        except OSError as error:
            raise failed(self._options, error) from error

    def begin(self, begun: Begun) -> Outcome[None]:
        data = json.dumps(dataclasses.asdict(begun)).encode()

        def write(work: Path) -> None:
            target = self._places.begun(self._scope.incarnation)
            make_folder(target.parent)
            draft = work / f"begun-{uuid.uuid4().hex}"
            write_new(draft, data)
            draft.rename(target)
            sync([target.parent])

        return self._as_owner(write)

    def decide(self, decision: Decision) -> Outcome[None]:
        """The decision and the files of this sink's participants, by one rename.

        1  check that this claim is the newest, and whether this very decision is in
        2  take the staged file of each participant into one folder   <- crash points of commit.apply
        3  write the record into it; all of it durable
        4  rename the folder to its final name                        <- from here on the batch counts, and is visible
        5  a copy of the record for the time when the folder is gone; forget old ones

        A batch without rows has no folder: its record alone is renamed. So is a later revision, in place of the copy.
        """
        text = decision.to_json()
        incarnation = self._scope.incarnation

        def write(work: Path) -> None:
            last = self._last(incarnation)
            if last is not None and last.to_json() == text:
                return
            revised = last is not None and last.batch == decision.batch and last.revision < decision.revision
            if last is not None and last.batch >= decision.batch and not revised:
                raise InvariantBroken(
                    "DECIDED_OTHERWISE",
                    f"Batch {decision.batch} of {self._scope} is decided already, or a later one is. What is visible "
                    "stays; nothing was added.",
                    next_step="stop every other driver on this checkpoint, then start the pipeline again",
                )
            records = make_folder(self._places.decided(incarnation))
            if last is not None:
                self._copy(last)
            exact = decision.guarantee is Guarantee.EXACTLY_ONCE
            participants = [p for p in decision.to_move if p.handle and exact]
            target = self._places.batch(incarnation, decision.batch)
            draft = work / f"{decision.batch}-{uuid.uuid4().hex}"
            if not participants:
                draft, target = draft.with_suffix(".json"), records / f"{decision.batch:010d}.json"
                write_new(draft, text.encode())
            else:
                draft.mkdir()
                for prepared in participants:
                    facts = {"batch": decision.batch, "shard": prepared.shard}
                    reach(StepId.COMMIT_APPLY, Moment.BEFORE, **facts)
                    self._take(prepared, draft)
                    reach(StepId.COMMIT_APPLY, Moment.AFTER, **facts)
                write_new(draft / RECORD, text.encode())
                sync([draft])
            draft.rename(target)  # THE line that decides a batch in this sink
            sync([target.parent])
            with contextlib.suppress(OSError):
                self._copy(decision)
                self._forget_old(decision.batch)

        return self._as_owner(write)

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
        """See `delivered.contract.powers.KnowsOthers`."""
        found = []
        for root in self._places.root.parent.parent.glob("p-*/s-*"):
            pipeline, sink = root.parent.name.removeprefix("p-"), root.name.removeprefix("s-")
            theirs = Places(self._options, Scope(pipeline, sink, self._scope.incarnation))
            if theirs.root != self._places.root:
                incarnation = self._scope.incarnation
                holds = bool(numbered(theirs.decided(incarnation))) or theirs.begun(incarnation).exists()
                found.append(OtherLedger(pipeline, sink, holds))
        return named_first(found)

    def close(self) -> None:
        """Nothing is held."""

    def _claim_once(self, owner: Owner) -> bool:
        found = self._owner()
        current, epoch = (found[0], found[1]) if found else (None, 0)
        superseded = current.superseded if current is not None else ()
        if current is not None and owner.id in superseded:
            raise self._fenced(owner.id, current)
        if current is not None and current.id != owner.id:
            superseded = (current.id, *superseded)[:OWNERS_REMEMBERED]
        owners, claims = make_folder(self._places.root / "owner"), make_folder(self._places.root / "claims")
        work = claims / f"{epoch + 1:010d}-{uuid.uuid4().hex}"
        work.mkdir()
        sync([claims])
        draft = owners / f".{uuid.uuid4().hex}"
        data = {**dataclasses.asdict(replace(owner, superseded=superseded)), "work": work.name}
        write_new(draft, json.dumps(data).encode())
        try:
            os.link(draft, owners / f"{epoch + 1:010d}.json")
        except FileExistsError:
            take_away(work)
            return False
        finally:
            draft.unlink()
        sync([owners])
        self._claimed = (owner.id, epoch + 1, work)
        return True

    def _fence(self, epoch: int) -> None:
        """Whatever an earlier claim has under way rests in its folder."""
        claims, gone = self._places.root / "claims", make_folder(self._places.root / "gone")
        for path in list(claims.iterdir()):
            if int(path.name.partition("-")[0]) < epoch:
                with contextlib.suppress(FileNotFoundError):
                    path.rename(gone / f"{path.name}.{uuid.uuid4().hex}")
        sync([claims])
        take_away(gone)

    def _as_owner(self, write: Callable[[Path], None]) -> Outcome[None]:
        """Run `write` once under this claim. Never runs it twice (P19). On a local disk every answer is an answer."""
        mine = self._claimed
        try:
            found = self._owner()
            if mine is None or found is None or (found[0].id, found[1]) != mine[:2]:
                raise self._fenced(mine[0] if mine else "none", found[0] if found else None)
            write(mine[2])
        except (DeliveredError, OSError) as error:
            if mine is not None and not mine[2].is_dir():
                return Failed(str(self._fenced(mine[0], None)))
            if isinstance(error, DeliveredError):
                return Failed(str(error))
            if error.errno in (errno.ENOTEMPTY, errno.EEXIST):
                return Failed(f"there is such a batch of somebody else: {error}")
            return Failed(str(failed(self._options, error)))
        return Ok(None)

    def _take(self, prepared: Prepared, folder: Path) -> None:
        """Move a staged file into the batch's folder, after a check that it is there, and whole."""
        handle = prepared.handle
        staged = self._places.staged(self._scope.incarnation) / Path(str(handle["file"])).name
        size = staged.stat().st_size if staged.exists() else None
        if size != handle["bytes"] or handle["rows"] != prepared.fingerprint.count:
            raise InvariantBroken(
                "STAGED_FILE_GONE",
                f"The staged file {str(staged)!r} has {'no' if size is None else size} bytes, prepared were "
                f"{handle['bytes']} with {handle['rows']} rows. Nothing of the batch is visible.",
                next_step="start the pipeline again; the batch runs again",
            )
        staged.rename(folder / f"{prepared.shard:05d}.{self._options.format}")

    def _state(self) -> LedgerState:
        incarnation = self._scope.incarnation
        found = self._owner()
        begun = self._places.begun(incarnation)
        decided = self._places.root / "decided"
        others = [p.name for p in decided.iterdir() if p.name != incarnation] if decided.is_dir() else []
        earlier = [d for d in (self._last(other) for other in others) if d is not None]
        known = {d.scope.incarnation for d in earlier} | {incarnation}
        begun_by = sorted((self._places.root / "begun").glob("*.json"), key=lambda p: -p.stat().st_mtime)
        last = self._last(incarnation)
        return LedgerState(
            owner=found[0] if found else None,
            last=last,
            begun=Begun(**json.loads(begun.read_bytes())) if begun.exists() else None,
            earlier=tuple(sorted(earlier, key=lambda d: -d.decided_at_ms)),
            earlier_begun=tuple(
                (path.stem, Begun(**json.loads(path.read_bytes()))) for path in begun_by if path.stem not in known
            ),
            epoch=found[1] if found else 0,
            archived=self._archive.read().find(incarnation) if last is None else None,
        )

    @property
    def _archive(self) -> ArchiveFiles:
        root = self._places.root
        return ArchiveFiles(Store(fs.SubTreeFileSystem(str(root), fs.LocalFileSystem()), root), "archive")

    def _owner(self) -> tuple[Owner, int, Path] | None:
        for epoch, path in sorted(numbered(self._places.root / "owner").items(), reverse=True):
            data = json.loads(path.read_bytes())
            work = self._places.root / "claims" / data.pop("work")
            return Owner(**{**data, "superseded": tuple(data["superseded"])}), epoch, work
        return None

    def _last(self, incarnation: str) -> Decision | None:
        """The newest record; that of the last batch may lie in the batch's folder alone."""
        copies = numbered(self._places.decided(incarnation))
        newest = max(copies, default=-1)
        record = self._places.batch(incarnation, newest + 1) / RECORD
        if record.exists():
            decision = Decision.from_json(record.read_bytes())
            mine = (decision.scope.pipeline, decision.scope.sink)
            if mine == (self._scope.pipeline, self._scope.sink):
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
        """Of other incarnations keep the newest decision; of very old ones the archived entry; of owners some."""
        root, mine = self._places.root, self._scope.incarnation
        decided = root / "decided"
        folders = sorted(decided.iterdir(), key=lambda p: -p.stat().st_mtime) if decided.is_dir() else []
        others = [p for p in folders if p.name != mine]
        old = (self._last(folder.name) for folder in others[LEDGER_INCARNATIONS:])
        self._archive.add(d.archived for d in old if d is not None)
        for number, folder in enumerate(others):
            records = numbered(folder)
            for batch, path in records.items():
                if number >= LEDGER_INCARNATIONS or batch != max(records):
                    path.unlink(missing_ok=True)
            if number >= LEDGER_INCARNATIONS:
                take_away(folder)
                self._places.begun(folder.name).unlink(missing_ok=True)
        for _, path in sorted(numbered(root / "owner").items())[:-OWNERS_REMEMBERED]:
            path.unlink(missing_ok=True)

    def _fenced(self, owner_id: str, current: Owner | None) -> Fenced:
        other = "another" if current is None else f"{current.id} (process {current.process} on {current.host!r})"
        return Fenced(
            "FENCED",
            f"Driver {owner_id} does not own the ledger of sink {self._scope.sink!r} of pipeline "
            f"{self._scope.pipeline!r} in {self._options.path!r} any more; it belongs to {other}, or to a later start.",
            next_step="nothing, if the later start is running; else start the pipeline again",
        )
