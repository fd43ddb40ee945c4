"""Dead letters of a pipeline, for an operator: list, retry, drop. Does not use Spark.

A retry is a batch of the commit engine, under the pipeline's guarantee, with a ledger of its own next to the sink's:
pipeline `<name>.dead-letters`. Its rows are dead letters instead of a source's records, and it has one shard.

    1  skip dead letters that the sink would reject again
    2  write a file into the checkpoint: the dead letters of this batch, and what became of all earlier ones
    3  run the batch, whose offsets name that file: claim, stage, prepare, decide, apply
    4  delete older files

What became of a dead letter is in the file that the newest decision names; a file that no decision names means nothing.
So a dead letter counts as retried if and only if its row is in the sink. A drop is a batch without rows.

Records that never became rows go through the pipeline once more, decoded and transformed, to every sink: one batch
writes their rows to all of them, with the ledger `<name>.dead-records`.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import uuid
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from enum import StrEnum
from functools import partial
from itertools import islice
from typing import Any, TypeVar

import psutil
import pyarrow as pa
from pyarrow import fs

from delivered.checkpoint import open_folder, read_logged, read_record, write_record
from delivered.contract.sink import Sink
from delivered.contract.source import COORDINATES, Source
from delivered.engine import Sinks, read_dead_letters
from delivered.engine.context import Context, new_owner
from delivered.engine.runner import Runner
from delivered.engine.shard import find_reasons, validate, write_shard
from delivered.engine.transform import ArrowTransform, run_isolated
from delivered.model.errors import DeliveredError, InvariantBroken, Refused, UsageError
from delivered.model.identity import DEAD_LETTERS, DEAD_RECORDS, Scope
from delivered.model.limits import DEAD_LETTERS_BATCH_MAX, DEAD_LETTERS_MAX
from delivered.model.rows import Origin, Rows, from_json_texts, reason_of
from delivered.model.step import Moment, StepId, reach
from delivered.model.work import Action, CheckpointView, Decision, LedgerState, ShardMessage, Started, Tolerance
from delivered.pipeline.definition import Definition
from delivered.pipeline.spec import NO_INCARNATION

T = TypeVar("T")

_FOLDER = "delivered/dead-letters"
_OFFSETS = "deadLetters"
KINDS = (Origin.SOURCE, Origin.TRANSFORM)
_REPLAY = "run `delivered replay` for the time of its record, or drop it"


class Status(StrEnum):
    OPEN = "open"
    RETRIED = "retried"
    """Its row is in the sink; or, under at_most_once, given up."""
    DROPPED = "dropped"
    STARTED = "begun"
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
        settled: dead letters by sink.
        rejected: ids of those that are still invalid, with the reason; they stay open.
        skipped: rows that the table did not accept: they are new dead letters, or only counted.
        more: there are open ones beyond the limit of one call.
    """

    settled: Counter[str] = field(default_factory=Counter)
    rejected: dict[str, str] = field(default_factory=dict)
    skipped: int = 0
    more: bool = False

    def lines(self, did: str, listing: str) -> list[str]:
        """For display.

        Args:
            did: "retried" or "dropped". listing: what shows those that are open: a command, or an address.
        """
        lines = ["; ".join(f"{n:,} {did} at {sink}" for sink, n in self.settled.items()) or f"nothing {did}"]
        if self.skipped:
            lines.append(f"The table did not accept {self.skipped:,} of them: {listing}")
        lines += [f"{name}: still rejected, {reason}" for name, reason in self.rejected.items()]
        return lines + (["More are open: repeat the command."] if self.more else [])


def dead_letters(pipeline: Definition, *, settled: bool = False, limit: int = DEAD_LETTERS_MAX) -> list[DeadLetter]:
    """Dead letters of the pipeline's checkpoint. Claims nothing and fences nobody.

    Args:
        settled: also those that were retried or dropped.

    Raises:
        UsageError: the pipeline keeps no dead letters.
        Refused: they cannot be read back.
        Unreachable: a server or the checkpoint did not answer.
    """
    unsettled = (Status.OPEN, Status.STARTED)
    listed = (n for n in _letters(pipeline, _queues(pipeline)) if settled or n.status in unsettled)
    return list(islice(listed, limit))


def retry(pipeline: Definition, ids: Collection[str] | None = None) -> Settlement:
    """Write dead letters to the sinks that rejected them. May be called again, after a kill anywhere.

    Args:
        ids: None: all that are open.

    Raises:
        UsageError: an id is unknown, or not open.
        Refused: a dead letter's sink is no longer in the pipeline, or its row no longer suits the sink's columns; or an
            unfinished retry can no longer be finished as it started.
        DeliveredError: as a batch of the pipeline.
    """
    return _settle(pipeline, Status.RETRIED, ids)


def drop(pipeline: Definition, ids: Collection[str] | None = None) -> Settlement:
    """Record that dead letters will not be retried. As `retry`."""
    return _settle(pipeline, Status.DROPPED, ids)


def _settle(pipeline: Definition, how: Status, ids: Collection[str] | None) -> Settlement:
    queues = _queues(pipeline)
    done = Settlement()
    every = {queue: partial(_letters, pipeline, own) for queue, own in _distinct(queues).items()}
    for queue, own in every.items():
        queue.finish(own)
    chosen = _chosen(pipeline, queues, ids)
    if len(chosen) > DEAD_LETTERS_MAX:
        chosen, done.more = chosen[:DEAD_LETTERS_MAX], True
    by_queue: dict[DeadLetterQueue, list[DeadLetter]] = {}
    for letter in chosen:
        if letter.sink not in queues:
            count = sum(n.sink == letter.sink for n in chosen)
            raise Refused("DEAD_LETTER_SINK", count=count, sink=letter.sink, sink_names=", ".join(pipeline.sink_names))
        by_queue.setdefault(queues[letter.sink], []).append(letter)
    for queue, letters in by_queue.items():
        for start in range(0, len(letters), DEAD_LETTERS_BATCH_MAX):
            queue.settle(letters[start : start + DEAD_LETTERS_BATCH_MAX], how, done, every[queue])
    return done


def _chosen(
    pipeline: Definition, queues: Mapping[str, DeadLetterQueue], ids: Collection[str] | None
) -> list[DeadLetter]:
    chosen, left = [], set(ids or ())
    for letter in _letters(pipeline, queues):
        if ids is None:
            if letter.status is Status.OPEN:
                chosen.append(letter)
        elif letter.id in left:
            left.discard(letter.id)
            if letter.status is not Status.OPEN:
                raise UsageError("DEAD_LETTER_SETTLED", id=letter.id, status=letter.status)
            chosen.append(letter)
        if len(chosen) > DEAD_LETTERS_MAX:
            break
    if left:
        raise UsageError("DEAD_LETTER_UNKNOWN", pipeline=pipeline.name, id=min(left), checkpoint=pipeline.checkpoint)
    return chosen


def _queues(pipeline: Definition) -> dict[str, DeadLetterQueue]:
    """By what a dead letter names as its sink."""
    incarnation = read_logged(pipeline.checkpoint)[0] or NO_INCARNATION
    queues = {
        name: DeadLetterQueue(pipeline, name, endpoint.sink(), incarnation)
        for name, endpoint in zip(pipeline.sink_names, pipeline.sinks, strict=True)
    }
    if pipeline.dead_letter is None:
        return queues
    return {**queues, **dict.fromkeys([o.value for o in KINDS], RecordQueue(pipeline, incarnation))}


def retry_queues(pipeline: Definition) -> list[DeadLetterQueue]:
    """Those that may have been retried."""
    every = list(_distinct(_queues(pipeline)))
    return every if pipeline.dead_letter is not None else [q for q in every if q.keeps]


def _distinct(queues: Mapping[str, DeadLetterQueue]) -> dict[DeadLetterQueue, dict[str, DeadLetterQueue]]:
    """Each queue, with the part of `queues` that names it."""
    return {queue: {n: d for n, d in queues.items() if d is queue} for queue in queues.values()}


def _letters(pipeline: Definition, queues: Mapping[str, DeadLetterQueue]) -> Iterator[DeadLetter]:
    """Each dead letter once, with its status."""
    incarnation = read_logged(pipeline.checkpoint)[0] or NO_INCARNATION
    known = {queue: queue.status() for queue in _distinct(queues)}
    status = {name: known[queue] for name, queue in queues.items()}
    seen: set[str] = set()
    keeps = pipeline.dead_letter is not None
    for letter in _in_sink(pipeline, incarnation):
        # An at_least_once pipeline may write one twice.
        if letter.id not in seen:
            seen.add(letter.id)
            yield _with_status(letter, status)
    for queue in known:
        kept = queue.kept()
        keeps = keeps or kept is not None
        for letter in kept or ():
            yield _with_status(letter, status)
    if not keeps:
        raise UsageError("DEAD_LETTERS_NONE", pipeline=pipeline.name, on_bad_row=pipeline.on_bad_row.value)


def _with_status(letter: DeadLetter, status: Mapping[str, Mapping[str, Status]]) -> DeadLetter:
    return replace(letter, status=status.get(letter.sink, {}).get(letter.id, Status.OPEN))


def _in_sink(pipeline: Definition, incarnation: str) -> Iterator[DeadLetter]:
    """Those in the dead-letter sink."""
    if pipeline.dead_letter is None or incarnation == NO_INCARNATION:
        return
    for fields in read_dead_letters(pipeline.dead_letter.sink(), pipeline.name, incarnation):
        where = {n: fields[n] for n in ("batch", "shard", "topic", "partition", "offset")}
        name = letter_id(fields["sink"], fields["batch"], fields["shard"], fields["row"])
        yield DeadLetter(name, fields["sink"], fields["reason"], record=fields["record"], **where)


def letter_id(*parts: Any) -> str:
    return hashlib.blake2b(json.dumps(parts).encode(), digest_size=8).hexdigest()


class DeadLetterQueue:
    """One sink's dead letters: the ledger of their retries, and what became of each.

    Attributes:
        label: what was written to, for reports.
        sinks, scope: of the retries, whose transactions at the sinks are their own.
        folder: of its files.
    """

    def __init__(
        self, pipeline: Definition, name: str, sink: Sink, incarnation: str, *, suffix: str = DEAD_LETTERS
    ) -> None:
        self.sink_name = self.label = self.folder = name
        self._pipeline = pipeline
        self._sink = sink
        self.sinks = Sinks.one(sink, name)
        self._origin = Scope(pipeline.name, name, incarnation)
        self.scope, self._of_records = self._origin.retries(suffix), self._origin.retries(DEAD_RECORDS)

    @property
    def keeps(self) -> bool:
        """Whether the sink's database keeps dead letters."""
        return self._sink.capability().write.conditional

    def kept(self) -> list[DeadLetter] | None:
        """Those that the sink's database keeps for the pipeline and for its retries; None: it keeps none."""
        if not self.keeps:
            return None
        letters = []
        # `again` is a part of the ids that settled ones are stored by.
        for scope, again in ((self._origin, False), (self.scope, True), (self._of_records, DEAD_RECORDS)):
            with closing(self._sink.committer(scope)) as committer:
                same: Counter[str] = Counter()
                for row in committer.dead_letters():
                    name = letter_id(self.sink_name, again, row.batch, row.shard, row.reason, row.record)
                    same[name] += 1  # equal rows cannot be distinguished, and need not be
                    name = name if same[name] == 1 else f"{name}-{same[name]}"
                    values = (name, self.sink_name, row.reason, row.batch, row.shard, row.record)
                    letters.append(DeadLetter(*values, again=bool(again)))
        return letters

    def status(self) -> dict[str, Status]:
        """By id; a dead letter that is not named is open."""

        def read(state: LedgerState) -> dict[str, Status]:
            settled, pending = self._settled(state), _pending(state)
            if pending is not None and pending is state.started:
                settled.update(dict.fromkeys(self._file(pending.offsets).ids, Status.STARTED))
            return settled

        with self._open() as context:
            return _look(context, read)

    def finish(self, letters: Callable[[], Iterable[DeadLetter]]) -> None:
        """Finish the newest batch, if it was decided, or may have sent rows. Args: letters: all of this sink."""
        with self._open() as context:
            self._finish(context, letters)

    def _finish(self, context: Context, letters: Callable[[], Iterable[DeadLetter]]) -> None:
        pending, file = _look(context, self._unfinished)
        if pending is not None and file is not None:
            self._run(context, pending.batch, pending.offsets, lambda: _of(file, letters))

    def settle(
        self,
        letters: Sequence[DeadLetter],
        how: Status,
        done: Settlement,
        every: Callable[[], Iterable[DeadLetter]],
    ) -> None:
        """Retry or drop open dead letters of this sink, in one batch. Args: every: all of this sink."""
        if how is Status.RETRIED:
            reasons = self._reasons(letters)
            done.rejected.update({n.id: r for n, r in zip(letters, reasons, strict=True) if r is not None})
            letters = [n for n, r in zip(letters, reasons, strict=True) if r is None]
        with self._open() as context:
            state = context.ledger.claim(context.owner)
            if _pending(state) is not state.last:  # another process started one after `finish`
                self._finish(context, every)
                state = context.ledger.claim(context.owner)
            settled = self._settled(state)  # by another process, meanwhile
            letters = [n for n in letters if n.id not in settled]
            if not letters:
                return
            batch = _newest(state) + 1
            offsets = json.dumps({_OFFSETS: f"{batch}.{uuid.uuid4().hex}"})
            file = _File(how, tuple(n.id for n in letters), settled)
            write_record(self._pipeline.checkpoint, self._path(offsets), file.to_json(), first=True)
            before = self._skipped()
            self._run(context, batch, offsets, lambda: letters if how is Status.RETRIED else [])
            done.skipped += self._skipped() - before
            done.settled[self.label] += len(letters)
            reach(StepId.LOG, Moment.BEFORE, batch=batch)
            self._delete_before(batch)
            reach(StepId.LOG, Moment.AFTER, batch=batch)

    def _run(self, context: Context, batch: int, offsets: str, letters: Callable[[], Sequence[DeadLetter]]) -> None:
        view = CheckpointView(self.scope.incarnation, batch, offsets, batch - 1 if batch else None)
        runner = Runner(self.sinks, context)
        plan = runner.plan(view, None)
        if plan.action is Action.SKIP and not plan.rewrite:
            return

        def write(messages: list[ShardMessage | None]) -> None:
            if wanted := letters():
                rows = self._as_rows(wanted)
                messages.append(write_shard(self.sinks, plan, 0, 0, iter([Rows(rows)]), rows.schema))

        runner.finish(plan, write)

    def _reasons(self, letters: Sequence[DeadLetter]) -> list[str | None]:
        """Why the sink would reject each row again; None: it would not."""
        rows = self._as_rows(letters)
        self._sink.check_schema(rows.schema)
        reasons = find_reasons(self._sink, rows)
        return [None] * len(letters) if reasons is None else list(reasons.to_pylist())

    def _as_rows(self, letters: Sequence[DeadLetter]) -> pa.RecordBatch:
        """Raises Refused: they do not suit the sink's columns."""
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

    def _skipped(self) -> int:
        """Rows that the sinks' tables did not accept, so far."""
        total = 0
        for member in self.sinks.members:
            if member.sink.capability().write.conditional:
                with closing(member.sink.committer(replace(self.scope, sink=member.name))) as committer:
                    total += sum(committer.skipped().values())
        return total

    def _open(self) -> closing[Context]:
        owner = new_owner(psutil.Process())
        tolerance = Tolerance(repeated_batch=self._pipeline.repeated_batch)
        return closing(Context.open(self.sinks, self.scope, self._pipeline.guarantee, owner, tolerance))

    def _unfinished(self, state: LedgerState) -> tuple[Decision | Started | None, _File | None]:
        pending = _pending(state)
        return pending, None if pending is None else self._file(pending.offsets)

    def _settled(self, state: LedgerState) -> dict[str, Status]:
        if state.last is None:
            return {}
        file = self._file(state.last.offsets)
        return {**file.before, **dict.fromkeys(file.ids, file.how)}

    def _path(self, offsets: str) -> str:
        return f"{_FOLDER}/{self.folder}/{json.loads(offsets)[_OFFSETS]}.json"

    def _file(self, offsets: str) -> _File:
        """Raises InvariantBroken: the ledger names a file that the checkpoint lacks: an older copy was put back."""
        where, path = self._pipeline.checkpoint, self._path(offsets)
        file = read_record(where, path, "settled dead letters", _File.from_json, "DEAD_LETTERS_DAMAGED")
        if file is None:
            raise InvariantBroken("DEAD_LETTERS_MISSING", path=path, where=where)
        return file

    def _delete_before(self, batch: int) -> None:
        """Delete the files of earlier batches, which no decision names any more."""
        filesystem, folder = open_folder(self._pipeline.checkpoint)
        own = fs.FileSelector(f"{folder.rstrip('/')}/{_FOLDER}/{self.folder}", allow_not_found=True)
        for file in filesystem.get_file_info(own):
            number = file.base_name.partition(".")[0]
            if number.isdigit() and int(number) < batch:
                with contextlib.suppress(FileNotFoundError):  # another process deleted it
                    filesystem.delete_file(file.path)


@dataclass(frozen=True)
class _File:
    """One batch of dead letters, and what became of earlier ones.

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


def _look(context: Context, read: Callable[[LedgerState], T]) -> T:
    """What the ledger says, with files that another process may delete as soon as it has decided a later batch."""
    while True:
        state = context.ledger.look()
        try:
            return read(state)
        except InvariantBroken:
            if context.ledger.look() == state:
                raise


def _newest(state: LedgerState) -> int:
    return -1 if state.last is None else state.last.batch


def _pending(state: LedgerState) -> Decision | Started | None:
    """The batch that a kill may have left unfinished."""
    started = state.started
    return started if started is not None and started.batch > _newest(state) else state.last


def _of(file: _File, letters: Callable[[], Iterable[DeadLetter]]) -> list[DeadLetter]:
    """The dead letters of a batch, in its order."""
    if file.how is not Status.RETRIED:
        return []
    own = {n.id: n for n in letters() if n.id in file.ids}
    return [own[name] for name in file.ids if name in own]


class RecordQueue(DeadLetterQueue):
    """Dead letters that are records of the source: their rows go to all sinks together."""

    def __init__(self, pipeline: Definition, incarnation: str) -> None:
        ends = zip(pipeline.sink_names, pipeline.sinks, strict=True)
        sinks = Sinks.of([(name, e.sink(), e.projection.route) for name, e in ends])
        super().__init__(pipeline, sinks.decider.name, sinks.decider.sink, incarnation, suffix=DEAD_RECORDS)
        self.sinks = sinks
        self.label, self.folder = ", ".join(pipeline.sink_names), "(records)"
        self._rows_by_id: dict[str, pa.RecordBatch] = {}
        self._columns: pa.Schema | None = None
        self._source_opened: Source | None = None

    def kept(self) -> None:
        """Those that a sink's database keeps are the sink's."""

    def _why_spark(self) -> str | None:
        """Why none can be retried without Spark; None: they can."""
        pipeline = self._pipeline
        if pipeline.transform.kind not in ("none", "arrow"):
            return f"the transform is in {pipeline.transform.kind}, which runs in Spark alone: {_REPLAY}"
        source = next(iter(pipeline.sources.values()))
        if source.is_spark_own:
            return f"the source {source.system!r} is Spark's own: {_REPLAY}"
        for name, endpoint in zip(pipeline.sink_names, pipeline.sinks, strict=True):
            if not endpoint.projection.is_plain:
                return f"the sink {name!r} has expressions in select or where, which run in Spark alone: {_REPLAY}"
        for member in self.sinks.members:
            if member.sink.schema_columns:
                return f"the sink {member.name!r} writes with a registry's schema, fixed when a query starts: {_REPLAY}"
        return None

    def _reasons(self, letters: Sequence[DeadLetter]) -> list[str | None]:
        why = self._why_spark()
        return [why or self._reason(letter) for letter in letters]

    def _reason(self, letter: DeadLetter) -> str | None:
        """Why it still does not become rows that every sink accepts; None: it does, and they are known."""
        rows, why = self._rows_of(letter)
        if rows is None:
            return why
        for member in self.sinks.members:
            try:
                own = member.routed(Rows(rows))
                member.sink.check_schema(own.good.schema)
            except UsageError as error:
                return f"{member.name}: {error}"
            for rejected in validate(member.sink, own).rejected:
                return f"{member.name}: {rejected.reason}"
        self._rows_by_id[letter.id] = rows
        return None

    def _rows_of(self, letter: DeadLetter) -> tuple[pa.RecordBatch | None, str]:
        source, transform = self._source(), self._pipeline.transform
        try:
            rows = source.decoded(_record(letter, source.raw_schema()))
        except (ValueError, TypeError, pa.ArrowException) as error:
            return None, f"its record does not suit the source's columns: {error}"
        if not rows.good.num_rows:
            return None, f"it cannot be decoded: {_why(rows)}"
        function = ArrowTransform(transform.select, transform.function)
        try:
            self._columns = self._columns or function(rows.good.slice(0, 0)).schema
            (part,) = run_isolated(function, rows, self._columns)
        except (DeliveredError, MemoryError):
            raise
        except Exception as error:  # also what would fail a task, such as a server that is down
            return None, reason_of(error)
        return (None if part.rejected else part.good), _why(part)

    def _as_rows(self, letters: Sequence[DeadLetter]) -> pa.RecordBatch:
        """Raises Refused: a dead letter of a batch that has to be finished no longer becomes rows."""
        for letter in letters:
            why = None if letter.id in self._rows_by_id else (self._why_spark() or self._reason(letter))
            if why is not None:
                raise Refused("DEAD_LETTER_RECORD", id=letter.id, reason=why)
        batches = [self._rows_by_id[letter.id] for letter in letters]
        tables = [pa.Table.from_batches([batch]) for batch in batches]
        table = pa.concat_tables(tables, promote_options="permissive").combine_chunks()
        rows = next(iter(table.to_batches()), batches[0])
        only = self.sinks.members[0]
        return rows if len(self.sinks.members) > 1 or only.route is None else only.route(rows)

    def _source(self) -> Source:
        if self._source_opened is None:
            self._source_opened = next(iter(self._pipeline.sources.values())).source().planned()
        return self._source_opened


def _why(rows: Rows) -> str:
    return rows.rejected[0].reason if rows.rejected else ""


def _record(letter: DeadLetter, schema: pa.Schema) -> pa.RecordBatch:
    """The source's record, as it was read. A column that the dead letter does not have is null."""
    record = json.loads(letter.record)
    for name in COORDINATES:
        record.setdefault(name, getattr(letter, name))
    return from_json_texts([json.dumps(record)], schema)
