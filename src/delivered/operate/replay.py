"""A pipeline's source once more: from one time to another into another sink, or from its start into a new table.

A replay is a pipeline of its own: name, checkpoint and ledger differ from the pipeline's, and follow from it, the times
and the target. So the same replay run again continues where it ended. The first run resolves the times to offsets and
keeps them in the replay's checkpoint. Its source acknowledges nothing.

A rebuild writes a table again, next to the one that a pipeline writes; then they are swapped:

    1  replay: from the pipeline's first offsets to those of its newest decision, into the new table
    2  compare: the pipeline is stopped, both tables end at the same offsets; are their rows the same?
    3  swap: in the transaction that revises that decision, which then names the new table

The old table stays, under another name. Each step may be repeated: after a kill, the same call goes on.
"""

from __future__ import annotations

import copy
import hashlib
import json
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar, runtime_checkable

import psutil
import yaml
from pydantic import ValidationError

from delivered.checkpoint import folders, is_done, read_logged, read_record, sidecar, write_record
from delivered.contract.sink import BoundedScan
from delivered.contract.source import Offsets
from delivered.engine.context import Context, find_living, new_owner, open_shared_ledger
from delivered.ledger import Store, Swap, SwapsTables
from delivered.model.errors import DeliveredError, OutcomeUnknown, Refused, UsageError, did_you_mean, without_passwords
from delivered.model.fingerprint import Fingerprint, fingerprint
from delivered.model.identity import SOURCE, Scope, by_source, derived_name
from delivered.model.step import Moment, StepId, reach
from delivered.model.work import Decision, Failed, LedgerState, Ok, Unknown
from delivered.operate.dead_letters import retry_queues
from delivered.pipeline.definition import AVAILABLE_NOW, Definition
from delivered.pipeline.endpoint import Endpoint
from delivered.pipeline.file import SinkEntry, endpoint_of, load_yaml
from delivered.pipeline.registry import connector
from delivered.pipeline.spec import NO_INCARNATION
from delivered.source import backwards

P = TypeVar("P", bound=Definition)

EARLIEST, LATEST = "earliest", "latest"
_FILE = "delivered/replay.json"
_TARGET_FILE = "delivered/target.json"
_SINCE = "startingTimestamp"
_OF_NONE = "startingOffsetsByTimestampStrategy"
"""Kafka's option for a partition without a record of that time."""
_TARGETS = ("dbtable", "table", "topic", "queue", "path")
"""The option that names a target, by system: the first that a sink has."""


def replay(pipeline: P, start: str, end: str, into: Endpoint | str, sink: str | None = None) -> P:
    """See `delivered.Pipeline.replay`."""
    own = _chosen(pipeline, sink)
    target = retargeted(own, into)
    check_target(pipeline, target)
    for name, source in pipeline.sources.items():
        check_replayable(name, source)
    key = short_hash([start, end, own.sink_name, target.system, {**target.options, **target.written}])
    derived = derive(pipeline, f".replay-{key}", target)
    begin, derived.until = _range(derived, start, end)
    for name in derived.sources:
        sidecar.keep_first(derived.checkpoint, lambda name=name: begin[name], name)  # type: ignore[misc]
    _keep_target(derived, own, into)
    return derived


def short_hash(values: Sequence[Any]) -> str:
    return hashlib.blake2b(json.dumps(values).encode(), digest_size=4).hexdigest()


def derive(pipeline: P, suffix: str, target: Endpoint) -> P:
    """A pipeline with the same source and transform, a name, checkpoint and ledger of its own, and this sink. It ends
    once everything up to `until` is delivered."""
    derived = copy.copy(pipeline)
    derived.name = derived_name(pipeline.name, suffix)
    derived.checkpoint = f"{pipeline.checkpoint.rstrip('/')}/delivered/{derived.name}"
    derived.sinks = (target,)
    derived.trigger = AVAILABLE_NOW
    derived.new_checkpoint = derived.missing_ledger = derived.repeated_batch = False
    derived.new_target = derived.lost_records = False
    return derived


def _keep_target(derived: Definition, own: Endpoint, into: Endpoint | str) -> None:
    """For `unfinished`. Not an endpoint's options, which may hold a password."""
    if isinstance(into, str):
        write_record(derived.checkpoint, _TARGET_FILE, {"sink": own.sink_name, "into": into}, first=True)


def unfinished(pipeline: P) -> list[P]:
    """Replays and rebuilds of a pipeline whose newest batch was not finished, as they were declared; without those into
    a sink of its own declaration.

    Raises:
        Unreachable: the checkpoint cannot be read.
    """
    found = []
    sinks = dict(zip(pipeline.sink_names, pipeline.sinks, strict=True))
    for name in folders(pipeline.checkpoint, "delivered"):
        derived = derive(pipeline, "", pipeline.sinks[0])
        derived.name, derived.checkpoint = name, f"{pipeline.checkpoint.rstrip('/')}/delivered/{name}"
        kept = read_record(derived.checkpoint, _TARGET_FILE, "a replay's target", dict, "REPLAY_DAMAGED")
        newest = read_logged(derived.checkpoint)[1] if kept is not None and kept["sink"] in sinks else None
        if kept is not None and newest is not None and not is_done(derived.checkpoint, newest):
            derived.sinks = (retargeted(sinks[kept["sink"]], str(kept["into"])),)
            found.append(derived)
    return found


def _chosen(pipeline: Definition, sink: str | None) -> Endpoint:
    named = dict(zip(pipeline.sink_names, pipeline.sinks, strict=True))
    if sink is None and len(named) == 1:
        return pipeline.sinks[0]
    if sink not in named:
        raise UsageError(
            "REPLAY_SINK",
            which="no sink is" if sink is None else "none is",
            sink=sink or "",
            known=", ".join(named),
            hint=did_you_mean(sink or "", named),
        )
    return named[sink]


def retargeted(own: Endpoint, into: Endpoint | str) -> Endpoint:
    """The sink of the replay: as given, or the pipeline's with another target; with the same rows and columns."""
    if isinstance(into, Endpoint):
        target = replace(into, projection=own.projection) if into.projection.is_all else into
        return target if target.audit else replace(target, audit=own.audit)
    by_name = {k.lower(): k for k in own.options}
    key = next((by_name[t] for t in _TARGETS if t in by_name), None)
    if key is None:
        raise UsageError("REPLAY_INTO", into=into, system=own.system, targets=", ".join(_TARGETS))
    if key.lower() == "path" and "/" not in into:
        into = "/".join([*own.options[key].rstrip("/").split("/")[:-1], into])
    return replace(own, options={**own.options, key: into}, name=None)


def check_target(pipeline: Definition, target: Endpoint) -> None:
    """Raises UsageError: the pipeline writes to this target itself."""
    ids = _identity(pipeline.name, target)
    for own in pipeline.all_sinks:
        same = own.system == target.system and dict(own.options) == dict(target.options)
        if same or (ids and ids == _identity(pipeline.name, own)):
            raise UsageError("REPLAY_TARGET", pipeline=pipeline.name, label=own.label)


def _identity(pipeline: str, endpoint: Endpoint) -> set[tuple[str, str]]:
    sink = endpoint.sink()
    with closing(sink.committer(Scope(pipeline, endpoint.name or sink.name, NO_INCARNATION))) as committer:
        return {(endpoint.system, t.id) for t in committer.targets().values()}


def check_replayable(name: str, source: Endpoint) -> None:
    what = "The source" if name == SOURCE else f"The source {name!r}"
    if source.is_spark_own:
        why = "it is Spark's own, whose offsets cannot be bounded"
        instead = f"read it with the format {source.system!r}"
    else:
        capability = source.source().capability()
        why = capability.consumed or ("" if capability.replayable else capability.why_not)
        instead = "replay a pipeline that reads what this one wrote"
    if why:
        raise Refused("REPLAY_SOURCE", what=what, system=source.system, reason=why, action=instead)


def _range(derived: Definition, start: str, end: str) -> tuple[dict[str, Offsets], dict[str, Offsets]]:
    """Start and end of each source; as kept by the first run."""

    def parse(data: Mapping[str, Any]) -> tuple[dict[str, Offsets], dict[str, Offsets]]:
        return dict(data["start"]), dict(data["until"])

    def read() -> tuple[dict[str, Offsets], dict[str, Offsets]] | None:
        return read_record(derived.checkpoint, _FILE, "a replay's range", parse, "REPLAY_DAMAGED")

    if (kept := read()) is not None:
        return kept
    ranges = {name: _resolve(name, source, start, end) for name, source in derived.sources.items()}
    begin, until = ({name: r[i] for name, r in ranges.items()} for i in (0, 1))
    write_record(derived.checkpoint, _FILE, {"start": begin, "until": until}, first=True)
    return read() or (begin, until)


def _resolve(name: str, source: Endpoint, start: str, end: str) -> tuple[Offsets, Offsets]:
    begin, until = (offsets_at(source, word, name) for word in (start, end))
    if (wrong := backwards(begin, until)) is not None:
        raise UsageError("REPLAY_RANGE", start=start, end=end, wrong=wrong)
    if isinstance(_place(start, name), int):
        _retained(source, start, begin)
    metadata = source.source().capability().offset_metadata
    return begin, {k: v for k, v in until.items() if k not in metadata}


def _place(text: str, source: str) -> int | str:
    """Milliseconds since 1970; or earliest, latest, or offsets as JSON."""
    word = text.strip()
    if word.lower() in (EARLIEST, LATEST):
        return word.lower()
    if word.startswith("{"):
        try:
            offsets = json.loads(word)
        except ValueError:
            raise _bad_time(text) from None
        return word if source == SOURCE else json.dumps(offsets.get(source, {}))
    if word.isascii() and word.isdigit():
        ms = int(word)
    else:
        try:
            at = datetime.fromisoformat(word)
        except ValueError:
            raise _bad_time(text) from None
        ms = int((at if at.tzinfo is not None else at.replace(tzinfo=UTC)).timestamp() * 1000)
    if ms > datetime.now(UTC).timestamp() * 1000:
        raise UsageError("REPLAY_FUTURE", text=text)
    return ms


def _bad_time(text: str) -> UsageError:
    return UsageError("REPLAY_TIME", text=text)


def offsets_at(source: Endpoint, word: str, name: str = SOURCE) -> Offsets:
    """The source's offsets at a time, or as the user says. Args: name: of the source."""
    place = _place(word, name)
    replaced = ("starting", "ending")
    options = {
        k: v for k, v in source.options.items() if not k.lower().startswith(replaced) and k.lower() != "subscription"
    }
    if isinstance(place, int):
        table = connector(source.system).source_options
        if table is None or _SINCE not in {o.name for o in table.options}:
            raise Refused("REPLAY_BY_TIME", system=source.system)
        options |= {_SINCE: str(place)}
        if any(o.name == _OF_NONE for o in table.options):
            options[_OF_NONE] = LATEST
    else:
        options["startingOffsets"] = place
    with closing(replace(source, options=options).source().planned().driver()) as driver:
        return driver.initial()


def _retained(source: Endpoint, start: str, begin: Offsets) -> None:
    """Raises Refused: a partition may have had records of the time that it no longer has."""
    for where, at, first in leaves("", begin, offsets_at(source, EARLIEST)):
        if at == first > 0:
            raise Refused("REPLAY_RECORDS_GONE", first=first, where=where, start=start)


def leaves(where: str, at: Mapping[str, Any], first: Mapping[str, Any]) -> list[tuple[str, int, int]]:
    """Positions by partition: in `at`, and in `first`; without those that are no numbers."""
    pairs: list[tuple[str, int, int]] = []
    for name in at.keys() & first.keys():
        a, b = at[name], first[name]
        if isinstance(a, dict) and isinstance(b, dict) and not name.startswith("#"):
            pairs += leaves(f"{where} {name}".strip(), a, b)
        elif type(a) is int and type(b) is int and name != "version":
            pairs.append((f"{where} {name}".strip(), a, b))
    return sorted(pairs)


def parse_sink(text: str, folder: Path) -> Endpoint:
    """A sink as in a pipeline file in `folder`, on one line: "{format: sqlite, path: out.db, table: orders}".

    Raises:
        UsageError: it is none.
    """
    try:
        entry = SinkEntry.model_validate(load_yaml(text))
    except (yaml.YAMLError, ValueError) as error:
        # pydantic's text repeats the values.
        why = "; ".join(e["msg"] for e in error.errors()) if isinstance(error, ValidationError) else str(error)
        raise UsageError("SINK_VALUE", text=without_passwords(text)[:300], reason=why) from None
    return endpoint_of(entry, folder)


_TABLE_LENGTH_MAX = 40


@dataclass(frozen=True)
class Comparison:
    """
    Attributes:
        old, new: rows of the two tables, as a sum that does not depend on their order.
        columns: why they cannot have the same rows; empty: their columns are the same.
    """

    old: Fingerprint
    new: Fingerprint
    columns: str = ""

    @property
    def equal(self) -> bool:
        return not self.columns and self.old == self.new

    def __str__(self) -> str:
        if self.columns:
            return self.columns
        if self.old.count != self.new.count:
            return f"the old table has {self.old.count:,} rows, the new one {self.new.count:,}"
        return f"both tables have {self.old.count:,} rows, with {'the same' if self.equal else 'different'} content"


@dataclass
class Rebuild(Generic[P]):
    """
    Attributes:
        pipeline: the replay into the new table, up to the newest decision. Run it to its end, again after a kill.
        table: the one that the pipeline writes.
        done: the tables have changed places already.
    """

    pipeline: P
    table: str
    done: bool
    _origin: Definition
    _swap: Swap

    @property
    def kept(self) -> str:
        """Name of the table's former rows after the swap."""
        return self._swap.kept

    def check_stopped(self) -> None:
        """
        Raises:
            Refused: the pipeline is running, has decided a batch since the replay, or has not finished its newest one;
                or the replay has not ended.
        """
        with _open(self._origin) as context:
            self._state(context, context.ledger.look())

    def compare(self) -> Comparison:
        """Read both tables. Call it while the pipeline is stopped. `swap` refuses later retries of dead letters."""
        for queue in retry_queues(self._origin):
            with closing(open_shared_ledger(queue.sinks, queue.scope)) as ledger:
                last = ledger.look().last
            self._swap = replace(self._swap, retries=(queue.scope, -1 if last is None else last.batch))
        old, new = (_only(p).sink().scan().planned() for p in (self._origin, self.pipeline))
        names = set(old.schema().names)
        if names != set(new.schema().names):
            ours, theirs = (", ".join(s.schema().names) for s in (old, new))
            columns = f"the old table has the columns {ours}, the new one {theirs}"
            return Comparison(Fingerprint(), Fingerprint(), columns)
        return Comparison(_content(old), _content(new))

    def swap(self) -> None:
        """Let the tables change places, in one transaction. May be called again.

        Raises:
            Refused: as `check_stopped`; or something in the database refers to the old table.
            DeliveredError: nothing was swapped: dead letters were retried since `compare`, or the server refused.
            OutcomeUnknown: the server did not answer; call again.
        """
        with _open(self._origin) as context:
            reach(StepId.RECOVER_CLAIM, Moment.BEFORE)
            self._state(context, context.ledger.look())
            # From here on, a driver that starts meanwhile fences this claim, or is fenced by it.
            state = context.ledger.claim(context.owner)
            reach(StepId.RECOVER_CLAIM, Moment.AFTER)
            if self._is_done(context):
                return
            last = self._state(context, replace(state, owner=None))
            targets = {k: v for k, v in last.targets.items() if k != context.scope.sink}
            if (new := _target_id(self.pipeline)) is not None:
                targets[context.scope.sink] = new
            revised = replace(last, owner=context.owner.id, revision=last.revision + 1, targets=targets)
            reach(StepId.COMMIT_DECIDE, Moment.BEFORE, batch=last.batch)
            outcome = context.ledger.decide(revised, self._swap)
            if isinstance(outcome, Unknown) and context.ledger.claim(context.owner).last == revised:
                outcome = Ok(None)
            match outcome:
                case Ok():
                    reach(StepId.COMMIT_DECIDE, Moment.AFTER, batch=last.batch)
                case Failed(reason):
                    raise DeliveredError("REBUILD_NOT_SWAPPED", reason=reason)
                case Unknown(reason):
                    raise OutcomeUnknown("REBUILD_UNKNOWN", reason=reason)

    def _state(self, context: Context, state: LedgerState) -> Decision:
        """The newest decision, if it is where the replay ended and nobody goes on."""
        if (owner := find_living(state.owner)) is not None:
            raise Refused("REBUILD_RUNNING", pipeline=self._origin.name, process=owner.process)
        last, until = state.last, dict(self.pipeline.until)
        with _open(self.pipeline) as rebuilt:
            filled = rebuilt.ledger.look().last
        if last is None or filled is None or not _ends(last) == _ends(filled) == until:
            raise Refused("REBUILD_BEHIND", pipeline=self._origin.name)
        still = len(context.committers.open_transactions())
        for queue in retry_queues(self._origin):
            with closing(queue.sinks.decider.sink.committer(queue.scope)) as committer:
                still += len(committer.open_transactions() or ())
        if still:
            raise Refused("REBUILD_UNFINISHED", count=still, pipeline=self._origin.name)
        return last

    def _is_done(self, context: Context) -> bool:
        with closing(_store(self._origin, context)) as store:
            return store.has_swapped(self._swap)


def rebuild(pipeline: P, into: str, start: str | None = None) -> Rebuild[P]:
    """See `delivered.Pipeline.rebuild`."""
    own = _only(pipeline)
    schema, table = _schema_and_table(own)
    key = short_hash([into, start, table])
    swap = Swap(into, f"{table[:_TABLE_LENGTH_MAX]}_before_{key}")
    with _open(pipeline) as context, closing(_store(pipeline, context)) as store:
        state = context.ledger.look()
        done = state.last is not None and store.has_swapped(swap)
        problem = None if done or state.last is None else store.cannot_swap()
    if state.last is None:
        raise UsageError("REBUILD_NOTHING", pipeline=pipeline.name, checkpoint=pipeline.checkpoint)
    if problem is not None:
        raise Refused("REBUILD_TARGET", label=own.label, problem=problem)
    if not into or "." in into or into == table:
        raise UsageError("REBUILD_INTO", into=into, table=table)
    name = f"{schema}.{into}" if schema else into
    target = retargeted(own, name)
    replayed = derive(pipeline, f".rebuild-{key}", target)
    replayed.until = _ends(state.last)
    if not done:
        check_target(pipeline, target)
        for of, source in replayed.sources.items():
            check_replayable(of, source)
            first = lambda n=of, s=source: _first(pipeline, n, s, start)  # noqa: E731
            sidecar.keep_first(replayed.checkpoint, first, of)
        _keep_target(replayed, own, name)
    return Rebuild(replayed, table, done, pipeline, swap)


def _only(pipeline: Definition) -> Endpoint:
    if len(pipeline.sinks) > 1 or pipeline.dead_letter is not None:
        raise Refused("REBUILD_SINKS", pipeline=pipeline.name)
    return pipeline.sinks[0]


def _schema_and_table(own: Endpoint) -> tuple[str, str]:
    """Of the sink's table; of other sinks: empty."""
    name = next((v for k, v in own.options.items() if k.lower() in ("dbtable", "table")), "")
    schema, _, table = name.rpartition(".")
    return schema, table


@runtime_checkable
class _Swapping(SwapsTables, Store, Protocol):
    """A store that swaps tables."""


def _store(pipeline: Definition, context: Context) -> _Swapping:
    own = _only(pipeline)
    store = own.sink().store(context.scope)
    if isinstance(store, _Swapping):
        return store
    store.close()
    raise Refused("REBUILD_SINK", system=own.system)


def _first(pipeline: Definition, name: str, source: Endpoint, start: str | None) -> Offsets:
    """Where the source's first batch began; or as the user says: where a snapshot in the new table ends."""
    first = sidecar.read_first(pipeline.checkpoint, name) if start is None else offsets_at(source, start, name)
    if first is None:
        raise Refused("REBUILD_START", checkpoint=pipeline.checkpoint)
    for where, at, kept in leaves("", first, offsets_at(source, EARLIEST, name)):
        if at < kept:
            raise Refused("REBUILD_RECORDS_GONE", position=at, where=where, kept=kept)
    return first


def _ends(last: Decision) -> dict[str, Offsets]:
    return {name: json.loads(text) for name, text in by_source(last.offsets).items()}


def _open(pipeline: Definition) -> closing[Context]:
    """The pipeline's ledger and committers. Claims nothing."""
    spec = pipeline.spec
    sinks = spec.open()
    scope = spec.scope(sinks, read_logged(pipeline.checkpoint)[0] or NO_INCARNATION)
    return closing(Context.open(sinks, scope, pipeline.guarantee, new_owner(psutil.Process())))


def _target_id(pipeline: Definition) -> str | None:
    """Identity of the table that a pipeline writes now."""
    with _open(pipeline) as context:
        return next((t.id for t in context.committers.targets().values()), None)


def _content(scan: BoundedScan) -> Fingerprint:
    """Of all rows, whatever the order of rows and columns."""
    names = sorted(scan.schema().names)
    batches = (batch for piece in scan.slices() for batch in scan.read(piece))
    return sum((fingerprint(batch.select(names), 0) for batch in batches), Fingerprint())
