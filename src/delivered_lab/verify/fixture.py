"""One case while it runs: pipeline file, runs, workload, the continuous reader of its sink, and what a fault's script
can do to it."""

from __future__ import annotations

import copy
import hashlib
import json
import random
import shutil
import subprocess
import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

import yaml

from delivered import Guarantee, UsageError
from delivered.testing import definition, first_records
from delivered_lab import brokers
from delivered_lab.verify.ahead import Driver, Drivers
from delivered_lab.verify.evidence import End, Evidence, History, Seen, Stop, sends
from delivered_lab.verify.producer import Producer
from delivered_lab.verify.proxy import Fired, Proxy
from delivered_lab.verify.services import (
    DRIVER,
    SERVICES,
    SPARK,
    Receivers,
    Run,
    Service,
    VerifierError,
    last_words,
    skewed,
    start,
)
from delivered_lab.verify.systems import POSTGRES_2PC, SINK_KINDS, at_sink, sink_entries
from delivered_lab.verify.systems.base import (
    Poll,
    QueueSource,
    Row,
    SinkClient,
    SourceClient,
    as_text,
    polling,
    wait_for,
)
from delivered_lab.verify.workloads import MASTER, PARTITIONS, TABLE, Effect, Record, Workload, records

_JOIN_S = 60.0
_POLL_S = 0.1
HIT_TIMEOUT_S = 240.0
END_TIMEOUT_S = 420.0
Part = TypeVar("Part")


@dataclass
class Setting:
    """What a case runs on: folder, records, source and sink, and any proxy in between.

    Attributes:
        checkpoint: its folder.
        extra: more keys of the pipeline file.
        proxy, broker: None without a server.
        source_broker: holds the source; None: the source needs no server.
        plain_s: time to the first effect of a plain restart; None: unknown.
        env: for the pipeline's processes.
        drivers: take the runs; None: each run is a process of its own.
        template: a user's pipeline that replaces the verifier's own.
    """

    name: str
    folder: Path
    guarantee: Guarantee
    workload: Workload
    seed: int
    source: SourceClient
    sink: SinkClient
    checkpoint: Path
    extra: dict[str, Any] = field(default_factory=dict)
    proxy: Proxy[Any] | None = None
    broker: brokers.Broker | None = None
    source_broker: brokers.Broker | None = None
    plain_s: float | None = None
    env: dict[str, str] = field(default_factory=dict)
    service: Service = SERVICES[SPARK]
    drivers: Drivers | None = None
    template: Template | None = None


class Fixture:
    """See the module. Not thread-safe; the reader has its own thread."""

    def __init__(self, setting: Setting) -> None:
        self.setting = setting
        self.random = random.Random(f"{setting.name}-{setting.seed}")  # noqa: S311
        self.folder = setting.folder
        self.folder.mkdir(parents=True, exist_ok=True)
        self.history = History(self.folder / "history.jsonl")
        self.checkpoint = setting.checkpoint
        self.sql: str | None = setting.workload.sql
        self.arrow: str | None = setting.workload.arrow
        self.extra = dict(setting.extra)
        self.runs: list[Run] = []
        self.stops: list[Stop] = []
        self.stays_down = False
        self.lost: list[Row] = []
        """Records that the source had delivered, and lost later."""
        self.clock_s = 0
        """How far the clock of the pipeline's host is ahead."""
        self.audited: dict[str, Any] | None = None
        self.result: Evidence | None = None
        self.records = records(setting.workload, setting.seed)
        self.reader = Reader(setting.name, setting.sink, setting.workload, setting.seed, self.history)
        self.receiving: Receivers | None = None
        self._sent = 0
        self._killed = False

    # -- before and after -------------------------------------------------------------------------------------------

    def open(self) -> None:
        source = self.setting.source
        source.create()
        self.setting.sink.create()
        self.reader.start()
        if isinstance(source, QueueSource):
            # A copy: a receiver may be reading the file while the pipeline's is rewritten.
            file = shutil.copy(self.pipeline_file(), self.folder / "receivers.yaml")
            self.receiving = Receivers(self.folder, source, Path(file), self.history, self.setting.env)

    def close(self) -> None:
        """Stop everything that this fixture started. May be called again."""
        for run in self.runs:
            if run.lives:
                run.kill()
        if self.receiving is not None:
            self.receiving.close()
        self.reader.close()
        self.history.close()

    # -- the workload -----------------------------------------------------------------------------------------------

    @property
    def left(self) -> list[Record]:
        """Records not sent yet."""
        return self.records[self._sent :]

    def send(self, share: float = 1.0, *, arrive: bool = True) -> None:
        """Send a share of all records, or those that are left, and wait for the acknowledgements.

        Args:
            arrive: for a queue, also wait until receivers have written them to the log, where a start finds them.
        """
        part = self.left[: max(1, round(share * len(self.records)))]
        ids = [self._record_id(r) for r in part]
        self._sent += len(part)
        self.history.add("producer", "send", End.STARTED, {"ids": ids})
        self.setting.source.send(part)
        self.history.add("producer", "send", End.OK, {"ids": ids})
        if arrive:
            self.arrive()

    def arrive(self) -> None:
        """Wait until a start of the pipeline would find all acknowledged records, or progress stops."""
        if self.receiving is not None:
            self.receiving.settle({i for i, end in sends(self.history).items() if end is End.OK})

    @property
    def receivers(self) -> Receivers:
        return self._present(self.receiving, "NO_RECEIVER")

    def producer(self, portion: int, pause_s: float, again: bool = True) -> Producer:
        """A producer application, in a process that can be killed, for all records that are left.

        Args:
            again: after a restart it resends what was not acknowledged.
        """
        left = [replace(r, id=self._record_id(r)) for r in self.left]
        producer = Producer(self.folder, self.setting.source, self.history, left, portion, pause_s, again)
        self._sent = len(self.records)
        return producer

    # -- the pipeline -----------------------------------------------------------------------------------------------

    def pipeline_file(self) -> Path:
        """The pipeline as a user would write it."""
        s = self.setting
        source = s.source.options()
        if s.workload.rows_per_batch is not None or "rows_per_batch" in self.extra:
            source["maxOffsetsPerTrigger"] = self.extra.get("rows_per_batch", s.workload.rows_per_batch)
        else:
            source["maxOffsetsPerTrigger"] = max(1, len(self.records) // 6)
        source |= self.extra.get("source", {})
        path = self.folder / "pipeline.yaml"
        if s.template is not None:
            own = s.template.filled(source, s.sink.options() | self.extra.get("sink", {}))
            own |= {"pipeline": s.name, "checkpoint": str(self.checkpoint), "trigger": "available_now"}
            own.setdefault("master", MASTER)
            own |= {k: v for k, v in self.extra.items() if k == "master"} | self.extra.get("pipeline", {})
            path.write_text(yaml.safe_dump(own, sort_keys=False), encoding="utf-8")
            return path
        data: dict[str, Any] = {
            "pipeline": s.name,
            "guarantee": s.guarantee.value,
            "checkpoint": str(self.checkpoint),
            "source": source,
            "transform": self._transform(),
            "sinks": [sink | self.extra.get("sink", {}) for sink in sink_entries(s.sink)],
            "trigger": self.extra.get("trigger", "available_now"),
            "master": self.extra.get("master", MASTER),
        }
        spark = {**s.workload.spark, **self.extra.get("spark", {})}
        if spark:
            data["spark"] = spark
        if s.workload.output_mode != "append":
            data["output_mode"] = s.workload.output_mode
        data |= self.extra.get("pipeline", {})
        path.write_text(yaml.safe_dump(data, sort_keys=False), encoding="utf-8")
        return path

    def _transform(self) -> dict[str, Any]:
        if self.sql:
            return {"sql": self.sql}
        workload = self.setting.workload
        if workload.python:
            # A static table is not state; if it changes, a rerun gives other rows.
            keeps = workload.table is None
            return {"python": workload.python, "stateful": keeps, "deterministic": keeps}
        if workload.topics > 1:
            # A table has no topics: both kinds of rows go into one.
            return (
                {"select": ["key", "value", "topic"], "arrow": self.arrow}
                if self.setting.sink.system == "kafka"
                else {"select": ["key", "value"]}
            )
        return {"select": ["key", "value"]} | ({"arrow": self.arrow} if self.arrow else {})

    def start(self, crash: str = "", *arguments: str) -> Run:
        """Start the pipeline with these crash points."""
        if self.receiving is not None:
            self.receiving.ready()
        number = len(self.runs) + 1
        s = self.setting
        driver = self._driver(pipeline := self.pipeline_file())
        log = self.folder / f"run{number}.spark.log"
        if driver is not None:
            log.hardlink_to(driver.log)
        command = [*s.service.command(pipeline, log if driver is None else driver.log), *arguments]
        env = s.env
        if s.workload.table is not None:
            s.workload.table(self.folder / "table", number)
            env = {**env, TABLE: str(self.folder / "table")}
        if self.clock_s:
            env = skewed(env, self.clock_s, self.folder / f"run{number}.clock")
        run = start(DRIVER, number, self.folder, command, crash, env, driver)
        run.started_s, run.after_kill = self.history.now_s, self._killed
        self._killed = False
        self.runs.append(run)
        self.history.add(run.name, "run", End.STARTED, {"crash": crash, "arguments": arguments})
        return run

    def _driver(self, pipeline: Path) -> Driver | None:
        """One that was started ahead; None: the run needs a session, or processes, of its own."""
        drivers = self.setting.drivers
        data = yaml.safe_load(pipeline.read_text(encoding="utf-8"))
        if drivers is None or self.clock_s or data.get("spark") or data["master"] != MASTER:
            return None
        driver = drivers.take()
        if driver is not None and data.get("output_mode", "append") != "append":
            driver.spent = True  # its own process keeps the crash points of its batches
        return driver

    def end(self, run: Run, timeout_s: float = END_TIMEOUT_S) -> str | None:
        """Wait for a run to end by itself; return its error code, None if it succeeded."""
        try:
            run.wait_end(timeout_s)
        except TimeoutError:
            run.kill()
            self.history.add(run.name, "run", End.UNKNOWN, {"output": last_words(run)})
            raise
        value = {"code": run.code} if run.code is None else {"code": run.code, "output": last_words(run)}
        self.history.add(run.name, "run", End.OK if run.code is None else End.FAILED, value)
        return run.code

    def kill(self, run: Run) -> None:
        """SIGKILL the process tree of a run."""
        processes = run.kill()
        self._killed = True
        self.history.add(run.name, "run", End.UNKNOWN, {"killed": processes})

    def must_stop(self, *codes: str, arguments: Sequence[str] = (), when: str) -> str | None:
        """Start the pipeline where stopping with one of these errors is the correct outcome."""
        code = self.end(self.start("", *arguments))
        self.stops.append(Stop(codes, code, when))
        return code

    def drain(self, most: int = 4) -> None:
        """Start the pipeline without faults until a run succeeds, at most `most` times; then all is delivered."""
        self.arrive()
        code: str | None = "?"
        for _ in range(most):
            code = self.end(self.start())
            if code is None:
                break
        self.stops.append(Stop((), code, "at the end"))

    def fire(self, name: str, **facts: Any) -> None:
        """Record that a fault fired."""
        self.history.add("fault", name, End.OK, facts)

    def audit(self) -> None:
        """Run `delivered audit`: a second opinion, and the count of given-up records."""
        s, pipeline = self.setting, self.pipeline_file()
        self.audited = s.service.audit(pipeline, self.folder, s.env, self._driver(pipeline))
        self.history.add("audit", "audit", End.OK, {k: self.audited[k] for k in ("verdict", "counts")})

    def _record_id(self, record: Record) -> str:
        return record.id if self.setting.template is None else row_effect(record.key, record.value).id

    def clock_read(self, run: Run) -> Path:
        """A file that is there once the commit engine of a run has read a clock that is ahead or behind."""
        return self.folder / f"run{run.number}.clock"

    # -- facts ------------------------------------------------------------------------------------------------------

    def batches_logged(self) -> list[int]:
        """Batches in Spark's commit log."""
        folder = self.checkpoint / "commits"
        return sorted(int(p.name) for p in folder.glob("*") if p.name.isdigit()) if folder.exists() else []

    def batches_planned(self) -> list[int]:
        folder = self.checkpoint / "offsets"
        return sorted(int(p.name) for p in folder.glob("*") if p.name.isdigit()) if folder.exists() else []

    def wait(self, what: Callable[[], bool], text: str, timeout_s: float = HIT_TIMEOUT_S) -> None:
        wait_for(what, timeout_s, text)

    @property
    def broker(self) -> brokers.Broker:
        return self._present(self.setting.broker, "NO_BROKER.ANY")

    @property
    def source_broker(self) -> brokers.Broker:
        return self._present(self.setting.source_broker, "NO_BROKER.SOURCE")

    @property
    def proxy(self) -> Proxy[Any]:
        return self._present(self.setting.proxy, "NO_PROXY")

    def _present(self, part: Part | None, code: str) -> Part:
        """Raises VerifierError: the case has no such part."""
        if part is None:
            raise VerifierError(code, case=self.setting.name)
        return part

    @property
    def effects_seen(self) -> int:
        """How many effects the reader has seen so far."""
        return len(self.reader.seen)

    def all_seen(self) -> None:
        """Wait until the reader has seen everything there is: whatever it sees from now on is new."""
        there = len(self.setting.sink.read())
        self.wait(lambda: self.effects_seen >= there, f"the reader sees all {there} effects")

    def on_network_fault(self, hit: Fired) -> None:
        self.fire(hit.rule, api=hit.api, version=hit.version, client=hit.client)


def empty(folder: Path) -> None:
    """Delete a case's earlier files, and unmount a small disk left over from a killed verifier."""
    for disk in [p for p in folder.glob("*") if p.is_mount()]:
        subprocess.run(["umount", "-l", str(disk)], check=True)
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)


# -- the continuous reader of the sink ---------------------------------------------------------------------------------


class Reader:
    """
    Attributes:
        seen: every effect, in the order found.
        snapshots: moments at which all of the sink was seen at once, as (seconds, effects visible).
        upserted: an operator's rows replace those with their key.
    """

    def __init__(self, name: str, sink: SinkClient, workload: Workload, seed: int, history: History) -> None:
        self.seen: list[Seen] = []
        self.snapshots: list[tuple[float, frozenset[str]]] = []
        self._name = name
        self._sink = sink
        self._workload = workload
        self._history = history
        self._visible: set[str] = set()
        self._error: str | None = None
        self.upserted = workload.output_mode == "update" and sink.options().get("mode") == "upsert"
        self._newest = LatestByKey(workload, records(workload, seed)) if workload.replaces else None
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"reader {name}", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        """Let it read what is there, then stop it. May be called again."""
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join(_JOIN_S)

    def check(self) -> None:
        """Raises VerifierError: it ended early."""
        if self._error is not None:
            raise VerifierError("READER_DIED", partition=self._name, error=self._error)

    def as_seen(self, rows: Sequence[Row]) -> list[Seen]:
        """The effects of rows that were read at one moment."""
        if self._newest is not None:
            return self._newest.seen_in(rows, self._history.now_s)
        return [self._one(r) for r in rows]

    def _one(self, row: Row) -> Seen:
        effect = self._workload.effect_of(row.key, row.value)
        partition = at_sink(row.sink, row.partition)
        return Seen(
            at_sink(row.sink, effect.id), partition, row.position, effect.key, effect.number, self._history.now_s
        )

    def _run(self) -> None:
        def note(poll: Poll) -> None:
            found = self.as_seen(poll.rows)
            self.seen.extend(found)
            if poll.snapshot:
                self._visible |= {s.effect for s in found}
                self.snapshots.append((self._history.now_s, frozenset(self._visible)))
            self._history.add("reader", "read", End.OK, {"effects": len(found), "all": len(self.seen)})

        try:
            if self._newest is None and not self.upserted:
                self._sink.follow(note, self._stop)
            else:
                self._follow_newest()
        except Exception as error:
            self._error = f"{type(error).__name__}: {error}"

    def _follow_newest(self) -> None:
        """Read the sink from its beginning again and again. While it cannot be read, there is nothing to see."""
        before: frozenset[str] = frozenset()
        for last in polling(self._stop, _POLL_S):
            try:
                rows = self._sink.read()
            except Exception:
                if last:
                    raise
                continue
            now_s = self._history.now_s
            found = self.as_seen(rows)
            back = self._newest.went_back(found, now_s) if self._newest is not None else []
            visible = frozenset(s.effect for s in found)
            if visible != before:
                fresh = [s for s in found if s.effect not in before]
                self.seen += [*fresh, *back]
                self.snapshots.append((now_s, visible))
                before = visible
                self._history.add("reader", "read", End.OK, {"effects": len(fresh), "all": len(self.seen)})


class LatestByKey:
    """Translates a sink that keeps the newest row per key into one that keeps all rows.

    Row n of a key implies that its records 0 to n came through: the checkers for lost, torn and rolled-back records see
    those. A key whose number decreased appears as an effect that is missing at the end.

    Args:
        sent: all possible records, numbered within each key.
    """

    def __init__(self, workload: Workload, sent: Sequence[Record]) -> None:
        self._workload = workload
        self._effects = {(r.key, r.number): workload.effect_of(r.key, r.value).id for r in sent}
        self._at: dict[str, int] = {}

    def seen_in(self, rows: Sequence[Row], at_s: float) -> list[Seen]:
        """All effects that the rows of a sink, seen at one moment, imply."""
        found: list[Seen] = []
        for row in rows:
            effect = self._workload.effect_of(row.key, row.value)
            key, number = effect.key, effect.number
            if key is None or number is None:
                found.append(Seen(effect.id, row.partition, row.position, at_s=at_s))
                continue
            ids = [self._effects.get((key, i), f"{key} {i}: nobody sent it") for i in range(number)]
            found += [Seen(e, key, i, key, i, at_s) for i, e in enumerate([*ids, effect.id])]
        return found

    def went_back(self, found: Sequence[Seen], at_s: float) -> list[Seen]:
        """Keys whose number is lower than at the previous call, or that are missing."""
        now: dict[str, int] = {}
        for s in found:
            if s.key is not None and s.number is not None:
                now[s.key] = max(s.number, now.get(s.key, -1))
        behind = [
            Seen(f"{key} went back from {before} to {now.get(key, 'nothing')}", key, before, key, before, at_s)
            for key, before in self._at.items()
            if now.get(key, -1) < before
        ]
        self._at = now
        return behind


SAMPLE_MAX = 600
_SOURCES = ("kafka", "log")
_SINKS = tuple(dict.fromkeys(k.format for k in SINK_KINDS.values() if k.own))
_REPLACED = {
    "assign", "subscribepattern", "subscribe", "path", "topic", "table", "startingoffsets", "startingtimestamp",
    "startingoffsetsbytimestamp", "maxoffsetspertrigger", "commitoffsetstogroup", "ledgertopic", "url", "dbtable",
    "user", "password", "ifnotexists", "fileformat", "partitionby",
}  # fmt: skip
"""Options that say where and how much; all others are kept."""


@dataclass
class Template:
    """A user's own pipeline, to be broken on purpose: its transform, guarantee and options, between the verifier's own
    source and sink. Nothing of the user's is written to; a few records of the source are read.

    The expected output is that of an undisturbed run, so the transform must give the same rows each time.

    Attributes:
        data: the pipeline as its file has it.
        folder: of the file; modules of its transform may lie there.
        sample: records of its source.
        reference: effects of an undisturbed run; None: not run yet.
    """

    data: dict[str, Any]
    folder: Path
    sample: list[Record]
    reference: Counter[str] | None = None
    workload: Workload = field(init=False)

    def __post_init__(self) -> None:
        self.workload = Workload(
            name="own",
            text="records of your own source",
            make=lambda _random, _count: iter(self.sample),
            ordered=False,
            records=len(self.sample),
            effect_reader=row_effect,
        )

    @property
    def guarantee(self) -> Guarantee:
        return Guarantee.parse(self.data["guarantee"])

    @property
    def source(self) -> str:
        return _system(self.data["source"])

    @property
    def sink(self) -> str:
        """The verifier's name of the sink, which includes the mechanism."""
        sink = self.data["sinks"][0]
        two_phase = (_option(sink, "mechanism") or "").lower() == "two_phase"
        return POSTGRES_2PC if two_phase else _system(sink)

    @property
    def needs_spark(self) -> bool:
        transform = self.data.get("transform") or {}
        return "sql" in transform or "python" in transform

    def filled(self, source: Mapping[str, Any], sink: Mapping[str, Any]) -> dict[str, Any]:
        """The pipeline with another source and sink of the same formats; other options stay."""
        data = copy.deepcopy(self.data)
        for place, new in ((data["source"], source), (data["sinks"][0], sink)):
            ours = {k.lower() for k in new} | _REPLACED
            kept = {k: v for k, v in place.items() if k.lower() not in ours}
            # The verifier's broker has no secrets or certificates.
            secret = ("kafka.security", "kafka.s", "storage.")
            kept = {k: v for k, v in kept.items() if not k.lower().startswith(secret)}
            place.clear()
            place.update(kept | dict(new))
        return data


def load_template(path: Path) -> Template:
    """Read a pipeline file and a few records of its source.

    Raises:
        UsageError: the file is not a pipeline, its formats cannot be verified yet, or its source has no records.
    """
    data = definition(path)
    source, sinks = data["source"], data["sinks"]
    for what, system, known in (("source", _system(source), _SOURCES), ("sink", _system(sinks[0]), _SINKS)):
        if system not in known:
            raise UsageError("VERIFY_FORMAT", what=what, system=system, known=" or ".join(known))
    if len(sinks) != 1:
        raise UsageError("VERIFY_SINKS", sink_count=len(sinks))
    sample = [
        Record(f"own{number}", as_text(key), number, number % PARTITIONS, raw=as_text(value) or "")
        for number, (key, value) in enumerate(first_records(path, SAMPLE_MAX))
    ]
    if not sample:
        raise UsageError("VERIFY_NO_RECORDS", pipeline=data["pipeline"])
    return Template(data, path.parent.resolve(), sample)


def row_effect(key: str | None, value: str) -> Effect:
    """The effect is the content of a row."""
    digest = hashlib.blake2b(json.dumps([key, value]).encode(), digest_size=10).hexdigest()
    return Effect(digest, key, None)


def _system(endpoint: Mapping[str, Any]) -> str:
    return str(endpoint["format"]).removeprefix("delivered_")


def _option(endpoint: Mapping[str, Any], name: str) -> str | None:
    return next((str(v) for k, v in endpoint.items() if k.lower() == name), None)
