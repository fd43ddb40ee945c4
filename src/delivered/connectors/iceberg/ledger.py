"""The ledger in the table's own metadata: a batch's files and its decision get in by one commit.

One owner at a time. A claim is a commit that moves a branch of the table to a new, empty snapshot; every decision names
the snapshot of its claim, and the catalog refuses it when the branch is elsewhere. So a decision never gets in behind a
later claim, whatever was under way, and rows that others append meanwhile fence nobody.
"""

from __future__ import annotations

import base64
import contextlib
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from delivered.connectors.iceberg import manifest
from delivered.connectors.iceberg.client import data_path, explained, open_table, require_table, store
from delivered.connectors.iceberg.commit import Change, commit
from delivered.connectors.iceberg.committer import claims_folder
from delivered.connectors.iceberg.merge import Effect, overwritten, upserted
from delivered.connectors.iceberg.options import IcebergOptions
from delivered.connectors.iceberg.records import (
    Claim,
    Names,
    Records,
    begun_text,
    decided_text,
    ledger_key,
    owner_text,
)
from delivered.connectors.iceberg.staged import ROWS
from delivered.connectors.iceberg.target import check_features, same_columns
from delivered.kits.table import stage
from delivered.model.archive import Archived
from delivered.model.errors import DeliveredError, Fenced, InvariantBroken, Unreachable
from delivered.model.guarantee import Guarantee
from delivered.model.identity import OtherLedger, Scope, Work, named_first
from delivered.model.limits import CONNECT_TIMEOUT_S, LEDGER_HISTORY_BATCHES, LEDGER_INCARNATIONS, OWNERS_REMEMBERED
from delivered.model.outcome import Failed, Ok, Outcome
from delivered.model.step import Moment, StepId, reach
from delivered.model.work import Begun, Decision, LedgerState, Owner, Prepared


@dataclass(frozen=True)
class _Earlier:
    """
    Attributes:
        decisions: the newest of each other incarnation, newest first.
        begun: batches of other incarnations that decided none.
    """

    decisions: tuple[Decision, ...]
    begun: tuple[tuple[str, Begun], ...]


class IcebergLedger:
    """See `delivered.contract.sink.Ledger`. Works by one claim; a later one, also of the same owner, voids it."""

    def __init__(self, options: IcebergOptions, scope: Scope) -> None:
        self._options = options
        self._scope = scope
        self._names = Names(scope)
        self._claimed: Claim | None = None
        self._earlier: tuple[int, _Earlier] | None = None

    def claim(self, owner: Owner) -> LedgerState:
        deadline = time.monotonic() + CONNECT_TIMEOUT_S
        while True:
            outcome = commit(self._options, lambda table: self._claim(table, owner))
            if isinstance(outcome, Ok):
                break
            if time.monotonic() > deadline:
                raise Unreachable(
                    "LEDGER_CONTENDED",
                    f"The ledger of sink {self._scope.sink!r} of pipeline {self._scope.pipeline!r} in the table "
                    f"{self._options.where} could not be claimed within {CONNECT_TIMEOUT_S:.0f} s: {outcome.reason}",
                    next_step="see whether another driver of this pipeline starts again and again; then start again",
                )
        table = require_table(self._options)
        held, mine = Records(table, self._scope).claim(), self._claimed
        if held is None or mine is None or (held.owner.id, held.epoch) != (mine.owner.id, mine.epoch):
            raise self._fenced(owner.id, held)  # by a claim that came right behind
        self._claimed = held
        stage.note_claim(ledger_key(self._options, self._scope), held.epoch)
        return self._state(table)

    def resume(self, owner_id: str) -> LedgerState:
        table = require_table(self._options)
        held = Records(table, self._scope).claim()
        if held is None or held.owner.id != owner_id:
            raise self._fenced(owner_id, held)
        self._claimed = held
        return self._state(table)

    def look(self) -> LedgerState:
        table = open_table(self._options)
        return LedgerState() if table is None else self._state(table)

    def begin(self, begun: Begun) -> Outcome[None]:
        incarnation = self._scope.incarnation

        def change(table: Any, claim: tuple[str, int]) -> Change | None:
            if Records(table, self._scope).begun(incarnation) == begun:
                return None
            properties = {self._names.begun(incarnation): begun_text(begun)}
            return Change(folder="", prefix="", properties=properties, claim=claim)

        return self._as_owner(change)

    def decide(self, decision: Decision) -> Outcome[None]:
        """The decision and the files of this sink's participants, in one commit.

        1  read the table; check that this claim is the newest, and whether this very decision is in
        2  check that the files are there, whole, and fit the table   <- crash points of commit.apply
        3  write the manifests of a new snapshot, which nothing points to yet
        4  one commit: the snapshot, and the record of the decision   <- from here on the batch counts
        5  take away what only the driver needed
        """
        incarnation, text = self._scope.incarnation, decision.to_json()
        staged: list[tuple[Prepared, list[Any]]] | None = None

        made = Effect()

        def change(table: Any, claim: tuple[str, int]) -> Change | None:
            nonlocal staged, made
            known = Records(table, self._scope).decided(incarnation)
            if known is not None and known.to_json() == text:
                return None
            revised = known is not None and known.batch == decision.batch and known.revision < decision.revision
            if known is not None and known.batch >= decision.batch and not revised:
                raise InvariantBroken(
                    "DECIDED_OTHERWISE",
                    f"Batch {decision.batch} of {self._scope} is decided already, or a later one is. What is visible "
                    "stays; nothing was added.",
                    next_step="stop every other driver on this checkpoint, then start the pipeline again",
                )
            made.discard()  # of a try behind which somebody else committed
            made = Effect()
            if staged is None:
                staged = self._staged(table, decision)
            made = self._effect(table, decision, staged)
            mark = uuid.uuid4()
            return Change(
                folder=stage.block_folder(self._scope, incarnation, decision.batch),
                prefix=f"{decision.batch}-",
                summary=self._names.summary(decision),
                files=made.adds,
                removes=made.removes,
                properties={self._names.decided(incarnation): decided_text(decision, mark, made.writer)},
                claim=claim,
                mark=mark,
            )

        outcome = self._as_owner(change)
        if isinstance(outcome, Failed):
            made.discard()
        if isinstance(outcome, Ok) and staged:
            rows = [name for p, _ in staged for name, _, _ in p.handle.get(ROWS, ())]
            self._take_away([*rows, *(f"{p.handle['writer']}-manifest.avro" for p, _ in staged if not rows)])
        return outcome

    def history(self) -> Iterator[Decision]:
        table = open_table(self._options)
        if table is not None:
            found = list(Records(table, self._scope).history(self._scope.incarnation))
            yield from found[-LEDGER_HISTORY_BATCHES:]

    def others(self) -> list[OtherLedger]:
        """See `delivered.contract.powers.KnowsOthers`."""
        properties, found = require_table(self._options).properties, []
        for name in properties:
            match name.split("/"):
                case ["delivered", pipeline, sink, "owner"] if name != self._names.owner:
                    names = Names(Scope(pipeline, sink, self._scope.incarnation))
                    known = (names.decided(names.scope.incarnation), names.begun(names.scope.incarnation))
                    found.append(OtherLedger(pipeline, sink, any(k in properties for k in known)))
                case _:
                    pass
        return named_first(found)

    def close(self) -> None:
        """Catalogs stay open in this process, for later batches."""

    def _claim(self, table: Any, owner: Owner) -> Change:
        held = Records(table, self._scope).claim()
        current, epoch = (held.owner, held.epoch + 1) if held is not None else (None, 1)
        superseded = current.superseded if current is not None else ()
        if current is not None and owner.id in superseded:
            raise self._fenced(owner.id, held)
        if current is not None and current.id != owner.id:
            superseded = (current.id, *superseded)[:OWNERS_REMEMBERED]
        self._claimed = Claim(owner, epoch, None)
        archive, removals = self._forgotten(table)
        return Change(
            folder=claims_folder(self._scope),
            prefix=f"{epoch}-",
            summary={"delivered.pipeline": self._scope.pipeline, "delivered.sink": self._scope.sink},
            branch=self._names.branch,
            properties={self._names.owner: owner_text(replace(owner, superseded=superseded), epoch), **archive},
            removals=removals,
            expires=[held.snapshot] if held is not None and held.snapshot is not None else [],
        )

    def _as_owner(self, change: Callable[[Any, tuple[str, int]], Change | None]) -> Outcome[None]:
        """Make a change under this claim, once (P19)."""

        def checked(table: Any) -> Change | None:
            held, mine = Records(table, self._scope).claim(), self._claimed
            if held is None or mine is None or held.snapshot is None or mine.snapshot != held.snapshot:
                raise self._fenced(mine.owner.id if mine else "none", held)
            return change(table, (self._names.branch, held.snapshot))

        try:
            return commit(self._options, checked)  # THE line that decides a batch in this sink
        except DeliveredError as error:
            # `commit` returns what it knows once it has asked the catalog; what raises comes before.
            return Failed(str(error))

    def _effect(self, table: Any, decision: Decision, staged: list[tuple[Prepared, list[Any]]]) -> Effect:
        """What the batch makes of the table as it is now."""
        with explained(self._options):
            if self._options.write.upserts:
                check_features(self._options, table)
                work = Work(decision.scope, decision.batch, 0, 0)
                return upserted(self._options, table, work, [files for _, files in staged])
            for prepared, _ in staged:
                handle = prepared.handle
                same_columns(self._options, table, handle["schema"], handle["spec"], handle["columns"])
            files = [file for _, files in staged for file in files]
            return overwritten(self._options, table, files) if self._options.write.replaces else Effect(files)

    def _staged(self, table: Any, decision: Decision) -> list[tuple[Prepared, list[Any]]]:
        """This sink's participants and their data files, after a check that these are there, and whole.

        Raises:
            InvariantBroken: a file is gone, or is not what was prepared.
        """
        participants = [p for p in decision.to_move if p.handle]
        if decision.guarantee is not Guarantee.EXACTLY_ONCE or not participants:
            return []
        found = []
        path = data_path(table)
        with explained(self._options):
            there = store(table, path).files(stage.block_folder(self._scope, self._scope.incarnation, decision.batch))
        for prepared in participants:
            facts = {"batch": decision.batch, "shard": prepared.shard}
            reach(StepId.COMMIT_APPLY, Moment.BEFORE, **facts)
            handle = prepared.handle
            if ROWS in handle:
                for name, size, _ in handle[ROWS]:
                    _whole(there, name, size)
                _same_count(prepared, sum(rows for _, _, rows in handle[ROWS]))
                found.append((prepared, [name for name, _, _ in handle[ROWS]]))
                reach(StepId.COMMIT_APPLY, Moment.AFTER, **facts)
                continue
            name = f"{handle['writer']}-manifest.avro"
            _whole(there, name, int(handle["bytes"]))
            try:
                with explained(self._options):
                    files = manifest.get(table, f"{path}/{name}", int(handle["bytes"]), int(handle["spec"]))
            except DeliveredError as error:
                if isinstance(error.__cause__, FileNotFoundError):
                    _whole({}, name, int(handle["bytes"]))
                raise
            for file in files:
                _whole(there, file.file_path.removeprefix(f"{path}/"), file.file_size_in_bytes)
            _same_count(prepared, sum(file.record_count for file in files))
            found.append((prepared, files))
            reach(StepId.COMMIT_APPLY, Moment.AFTER, **facts)
        return found

    def _state(self, table: Any) -> LedgerState:
        records, incarnation = Records(table, self._scope), self._scope.incarnation
        held = records.claim()
        earlier = self._others(records, held.epoch if held else 0)
        last = records.decided(incarnation)
        return LedgerState(
            owner=held.owner if held else None,
            last=last,
            begun=records.begun(incarnation),
            earlier=earlier.decisions,
            earlier_begun=earlier.begun,
            epoch=held.epoch if held else 0,
            archived=records.archived(incarnation) if last is None else None,
        )

    def _others(self, records: Records, epoch: int) -> _Earlier:
        """What other incarnations left cannot change while one owner holds the ledger: read once for each claim."""
        if self._earlier is None or self._earlier[0] != epoch:
            mine = self._scope.incarnation
            found = [records.decided(i) for i in records.incarnations() if i != mine]
            decisions = sorted((d for d in found if d is not None), key=lambda d: -d.decided_at_ms)
            begun = [(i, records.begun(i)) for i in records.only_begun() if i != mine]
            self._earlier = (epoch, _Earlier(tuple(decisions), tuple((i, b) for i, b in begun if b is not None)))
        return self._earlier[1]

    def _forgotten(self, table: Any) -> tuple[dict[str, str], list[str]]:
        """Properties of very old incarnations, and the one that keeps what is left of them."""
        records = Records(table, self._scope)
        others = self._others(records, -1)
        self._earlier = None
        decided, begun = others.decisions[LEDGER_INCARNATIONS:], others.begun[LEDGER_INCARNATIONS:]
        if not decided and not begun:
            return {}, []
        entries = [*(d.archived for d in decided), *(Archived.begun(i) for i, _ in begun)]
        kept = base64.b64encode(records.archive().with_more(entries).data).decode()
        old = [*(d.scope.incarnation for d in decided), *(i for i, _ in begun)]
        names = [name for i in old for name in (self._names.decided(i), self._names.begun(i))]
        return {self._names.archive: kept}, [name for name in names if name in table.properties]

    def _take_away(self, names: list[str]) -> None:
        """What nothing points to any more. Missed now, it is found at the next claim."""
        with contextlib.suppress(OSError, DeliveredError):
            table = require_table(self._options)
            store(table, data_path(table)).remove(names)

    def _fenced(self, owner_id: str, held: Claim | None) -> Fenced:
        current = held.owner if held is not None else None
        other = "nobody" if current is None else f"{current.id} (process {current.process} on {current.host!r})"
        return Fenced(
            "FENCED",
            f"Driver {owner_id} does not own the ledger of sink {self._scope.sink!r} of pipeline "
            f"{self._scope.pipeline!r} in the table {self._options.where} any more; it belongs to {other}, or to a "
            "later start.",
            next_step="nothing, if the later start is running; else start the pipeline again",
        )


def _whole(there: Mapping[str, int], name: str, size: int) -> None:
    if there.get(name) != size:
        raise InvariantBroken(
            "STAGED_FILE_GONE",
            f"The staged file {name!r} has {there.get(name, 'no')} bytes, prepared were {size}. Nothing of the batch "
            "is visible.",
            next_step="start the pipeline again; the batch runs again",
        )


def _same_count(prepared: Prepared, rows: int) -> None:
    if rows != prepared.fingerprint.count:
        raise InvariantBroken(
            "STAGED_ROWS_DIFFER",
            f"Shard {prepared.shard}: {rows} rows are in its files, its fingerprint counts "
            f"{prepared.fingerprint.count}.",
            next_step="start the pipeline again; the batch runs again",
        )
