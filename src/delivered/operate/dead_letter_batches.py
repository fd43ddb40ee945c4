"""Batches of dead letters that go back to one sink, and what became of each letter.

A retry is a batch of the commit engine, under the pipeline's guarantee, with a ledger of its own next to the sink's:
pipeline `<name>.dead-letters`. Its rows are letters instead of a source's records, and it has one shard.

    1  leave out letters that the sink would reject again
    2  write a file into the checkpoint: the letters of this batch, and what became of all earlier ones
    3  run the batch, whose offsets name that file: claim, stage, prepare, decide, apply
    4  delete older files

What became of a letter is in the file that the newest decision names; a file that no decision names means nothing. So
a letter counts as retried if and only if its row is in the sink. A drop is a batch without rows.
"""

from __future__ import annotations

import hashlib
import json
import uuid
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

import psutil
import pyarrow as pa
from pyarrow import fs

from delivered.checkpoint.folder import open_folder, read_record, write_record
from delivered.contract.sink import Sink
from delivered.engine.context import Context
from delivered.engine.dead_letters import find_reasons
from delivered.engine.owner import new_owner
from delivered.engine.runner import Runner
from delivered.engine.shard import write_shard
from delivered.engine.sinks import Sinks
from delivered.model.bad_row import from_json_texts
from delivered.model.errors import InvariantBroken, Refused
from delivered.model.identity import Scope, derived_name
from delivered.model.rows import Rows
from delivered.model.step import Moment, StepId, reach
from delivered.model.work import Action, Begun, CheckpointView, Decision, LedgerState, ShardMessage
from delivered.pipeline.definition import Definition

_FOLDER = "delivered/dead-letters"
_SUFFIX = ".dead-letters"
RECORDS = ".dead-records"
"""Suffix of the ledger of `RecordDesk`."""
_OFFSETS = "deadLetters"


class Status(StrEnum):
    OPEN = "open"
    RETRIED = "retried"
    """Its row is in the sink; or, under at_most_once, given up."""
    DROPPED = "dropped"
    BEGUN = "begun"
    """A retry was killed whose rows may be visible: the next retry or drop finishes it."""


@dataclass(frozen=True)
class DeadLetter:
    """
    Attributes:
        id: stays the same; unique in the pipeline.
        sink: that rejected the row.
        batch, shard: of the pipeline; of a retry if `again`.
        again: a retry was rejected by the table.
        topic, partition, offset: of the source's record, if known.
        record: the row as JSON.
    """

    id: str
    sink: str
    reason: str
    batch: int
    shard: int
    record: str
    status: Status = Status.OPEN
    again: bool = False
    topic: str | None = None
    partition: int | None = None
    offset: int | None = None


@dataclass
class Settlement:
    """What a retry or a drop did.

    Attributes:
        settled: letters by sink.
        rejected: ids of letters that are still invalid, with the reason; they stay open.
        left_out: rows that the table did not accept: they are new dead letters, or skipped.
        more: open letters beyond the limit of one call.
    """

    settled: Counter[str] = field(default_factory=Counter)
    rejected: dict[str, str] = field(default_factory=dict)
    left_out: int = 0
    more: bool = False


def letter_id(*parts: Any) -> str:
    return hashlib.blake2b(json.dumps(parts).encode(), digest_size=8).hexdigest()


class Desk:
    """One sink's dead letters: the ledger of their retries, and what became of each.

    Attributes:
        label: what was written to, for reports.
        folder: of its files.
    """

    def __init__(self, pipeline: Definition, name: str, sink: Sink, incarnation: str, *, suffix: str = _SUFFIX) -> None:
        self.sink_name = self.label = self.folder = name
        self._pipeline = pipeline
        self._sink = sink
        self._sinks = Sinks.one(sink, name)
        self._origin = Scope(pipeline.name, name, incarnation)
        # Another one than the pipeline's, which would be taken for renamed.
        own = uuid.uuid5(uuid.NAMESPACE_OID, incarnation).hex
        self._scope = Scope(derived_name(pipeline.name, suffix), name, own)
        self._of_records = Scope(derived_name(pipeline.name, RECORDS), name, own)

    def kept(self) -> list[DeadLetter] | None:
        """Letters that the sink's database keeps for the pipeline and for its retries; None: it keeps none."""
        found = []
        if not self._sink.capability().write.conditional:
            return None
        # `again` is a part of ids that settled letters are stored by.
        for scope, again in ((self._origin, False), (self._scope, True), (self._of_records, RECORDS)):
            with closing(self._sink.committer(scope)) as committer:
                same: Counter[str] = Counter()
                for row in committer.dead_letters():
                    name = letter_id(self.sink_name, again, row.batch, row.shard, row.reason, row.record)
                    same[name] += 1  # equal rows cannot be told apart, and need not be
                    name = name if same[name] == 1 else f"{name}-{same[name]}"
                    found.append(
                        DeadLetter(
                            name, self.sink_name, row.reason, row.batch, row.shard, row.record, again=bool(again)
                        )
                    )
        return found

    def status(self) -> dict[str, Status]:
        """By id; a letter that is not named is open."""
        with self._opened() as context:
            state = context.ledger.look()
        settled, pending = self._settled(state), _pending(state)
        if pending is not None and pending is state.begun:
            settled.update(dict.fromkeys(self._file(pending.offsets).ids, Status.BEGUN))
        return settled

    def finish(self, letters: Callable[[], Iterable[DeadLetter]]) -> None:
        """Finish the newest batch, if it was decided, or may have sent rows.

        Args:
            letters: all of this sink.
        """
        with self._opened() as context:
            pending = _pending(context.ledger.look())
            if pending is not None:
                file = self._file(pending.offsets)
                self._run(context, pending.batch, pending.offsets, lambda: _of(file, letters))

    def settle(self, letters: Sequence[DeadLetter], how: Status, done: Settlement) -> None:
        """Retry or drop open letters of this sink, in one batch."""
        if how is Status.RETRIED:
            reasons = self._reasons(letters)
            done.rejected.update({n.id: r for n, r in zip(letters, reasons, strict=True) if r is not None})
            letters = [n for n, r in zip(letters, reasons, strict=True) if r is None]
        with self._opened() as context:
            state = context.ledger.claim(context.owner)
            settled = self._settled(state)  # by another process, meanwhile
            letters = [n for n in letters if n.id not in settled]
            if not letters:
                return
            batch = _newest(state) + 1
            offsets = json.dumps({_OFFSETS: f"{batch}.{uuid.uuid4().hex}"})
            file = _File(how, tuple(n.id for n in letters), settled)
            write_record(self._pipeline.checkpoint, self._path(offsets), file.to_json(), first=True)
            before = self._left_out()
            self._run(context, batch, offsets, lambda: letters if how is Status.RETRIED else [])
            done.left_out += self._left_out() - before
            done.settled[self.label] += len(letters)
            reach(StepId.LOG, Moment.BEFORE, batch=batch)
            self._delete_before(batch)
            reach(StepId.LOG, Moment.AFTER, batch=batch)

    def _run(self, context: Context, batch: int, offsets: str, letters: Callable[[], Sequence[DeadLetter]]) -> None:
        view = CheckpointView(self._scope.incarnation, batch, offsets, batch - 1 if batch else None)
        runner = Runner(self._sinks, context)
        plan = runner.plan(view, None)
        if plan.action is Action.SKIP and not plan.rewrite:
            return

        def write(messages: list[ShardMessage | None]) -> None:
            if wanted := letters():
                rows = self._as_rows(wanted)
                messages.append(write_shard(self._sinks, plan, 0, 0, iter([Rows(rows)]), rows.schema))

        runner.finish(plan, write)

    def _reasons(self, letters: Sequence[DeadLetter]) -> list[str | None]:
        """Why the sink would reject each letter again; None: it would not."""
        rows = self._as_rows(letters)
        self._sink.check_schema(rows.schema)
        found = find_reasons(self._sink, rows)
        return [None] * len(letters) if found is None else list(found.to_pylist())

    def _as_rows(self, letters: Sequence[DeadLetter]) -> pa.RecordBatch:
        """
        Raises:
            Refused: they do not suit the sink's columns.
        """
        kinds = self._types()
        names = dict.fromkeys(name for n in letters for name in json.loads(n.record))
        try:
            schema = pa.schema([(n, kinds[n] if kinds else pa.string()) for n in names])
            return from_json_texts([n.record for n in letters], schema)
        except (ValueError, TypeError, KeyError, pa.ArrowException) as error:
            problem = f"it has no column {error}" if isinstance(error, KeyError) else str(error)
            raise Refused(
                "DEAD_LETTER_COLUMNS", letter_count=len(letters), sink=self.sink_name, problem=problem
            ) from error

    def _types(self) -> dict[str, pa.DataType]:
        """Of the sink's columns; empty: all are text."""
        try:
            schema = self._sink.scan().planned().schema()
        except Refused:  # it cannot be read back
            return {}
        mode = self._sink.capability().write
        kinds = dict(zip(schema.names, schema.types, strict=True))
        if mode.delete is not None:
            kinds[mode.delete] = pa.bool_()
        if mode.expected is not None:
            kinds[mode.expected] = kinds[str(mode.version)]
        return kinds

    def _left_out(self) -> int:
        if not self._sink.capability().write.conditional:
            return 0
        with closing(self._sink.committer(self._scope)) as committer:
            return sum(committer.left_out().values())

    @contextmanager
    def _opened(self) -> Iterator[Context]:
        owner = new_owner(psutil.Process())
        context = Context.open(self._sinks, self._scope, self._pipeline.guarantee, owner)
        try:
            yield context
        finally:
            context.close()

    def _settled(self, state: LedgerState) -> dict[str, Status]:
        if state.last is None:
            return {}
        file = self._file(state.last.offsets)
        return {**file.before, **dict.fromkeys(file.ids, file.how)}

    def _path(self, offsets: str) -> str:
        return f"{_FOLDER}/{self.folder}/{json.loads(offsets)[_OFFSETS]}.json"

    def _file(self, offsets: str) -> _File:
        """
        Raises:
            InvariantBroken: the ledger names a file that the checkpoint lacks: an older copy was put back.
        """
        where, path = self._pipeline.checkpoint, self._path(offsets)
        found = read_record(where, path, "settled dead letters", _File.from_json, "DEAD_LETTERS_DAMAGED")
        if found is None:
            raise InvariantBroken("DEAD_LETTERS_MISSING", path=path, where=where)
        return found

    def _delete_before(self, batch: int) -> None:
        """Delete the files of earlier batches, which no decision names any more."""
        filesystem, folder = open_folder(self._pipeline.checkpoint)
        own = fs.FileSelector(f"{folder.rstrip('/')}/{_FOLDER}/{self.folder}", allow_not_found=True)
        for file in filesystem.get_file_info(own):
            number = file.base_name.partition(".")[0]
            if number.isdigit() and int(number) < batch:
                filesystem.delete_file(file.path)


@dataclass(frozen=True)
class _File:
    """One batch of letters, and what became of earlier ones.

    Attributes:
        before: by id.
    """

    how: Status
    ids: tuple[str, ...]
    before: Mapping[str, Status]

    def to_json(self) -> dict[str, Any]:
        return {"how": self.how, "ids": self.ids, "before": self.before}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> _File:
        return cls(Status(data["how"]), tuple(data["ids"]), {n: Status(s) for n, s in data["before"].items()})


def _newest(state: LedgerState) -> int:
    return -1 if state.last is None else state.last.batch


def _pending(state: LedgerState) -> Decision | Begun | None:
    """The batch that a kill may have left unfinished."""
    begun = state.begun
    return begun if begun is not None and begun.batch > _newest(state) else state.last


def _of(file: _File, letters: Callable[[], Iterable[DeadLetter]]) -> list[DeadLetter]:
    """The letters of a batch, in its order."""
    if file.how is not Status.RETRIED:
        return []
    own = {n.id: n for n in letters() if n.id in file.ids}
    return [own[name] for name in file.ids if name in own]
