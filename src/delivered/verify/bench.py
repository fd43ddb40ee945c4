"""One cell while it runs: the pipeline file, its runs, the workload, the reader, and what a fault's script may do."""

from __future__ import annotations

import itertools
import json
import random
import shutil
import subprocess
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml

from delivered import brokers
from delivered.verify.clients.base import Look, Row
from delivered.verify.clients.several import at_sink, names_of, sinks_of
from delivered.verify.evidence import Evidence, Seen, Stop
from delivered.verify.history import End, History, fired, sends
from delivered.verify.producing import Producer
from delivered.verify.services import Run, Trouble, last_words, start, wait_for
from delivered.verify.setting import Setting
from delivered.verify.template import whole
from delivered.verify.wire import Fired
from delivered.verify.workloads import Record, records, source_id

HIT_TIMEOUT_S = 240.0
END_TIMEOUT_S = 420.0
_SETTLE_S = 15.0


class Bench:
    """See the module. Used by one thread; the reader has its own."""

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
        self.audited: dict[str, Any] | None = None
        self.result: Evidence | None = None
        self._records = records(setting.workload, setting.seed)
        self._sent = 0
        self._seen: list[Seen] = []
        self._snapshots: list[tuple[float, frozenset[str]]] = []
        self._visible: set[str] = set()
        self._reader_error: str | None = None
        self._stop_reading = threading.Event()
        self._reader = threading.Thread(target=self._read_all_along, name=f"reader {setting.name}", daemon=True)
        self._killed = False

    # -- before and after -------------------------------------------------------------------------------------------

    def open(self) -> None:
        self.setting.feed.create()
        self.setting.drain.create()
        self._reader.start()

    def close(self) -> None:
        """End everything that this bench started. May be called again."""
        for run in self.runs:
            if run.lives:
                run.kill()
        self._stop_reading.set()
        if self._reader.is_alive():
            self._reader.join(60)
        self.history.close()

    # -- the workload -----------------------------------------------------------------------------------------------

    @property
    def left(self) -> list[Record]:
        """Records that were not sent yet."""
        return self._records[self._sent :]

    def send(self, share: float = 1.0) -> None:
        """Send a share of all records, or what is left of them, and wait until they are acknowledged."""
        part = self.left[: max(1, round(share * len(self._records)))]
        ids = [self._record_id(r) for r in part]
        self._sent += len(part)
        self.history.add("producer", "send", End.BEGUN, {"ids": ids})
        self.setting.feed.send(part)
        self.history.add("producer", "send", End.OK, {"ids": ids})

    def produce_aside(self, portion: int, pause_s: float) -> Producer:
        """A producer application for all that is left, as a process that can be killed."""
        left = [replace(r, id=self._record_id(r)) for r in self.left]
        producer = Producer(self.folder, self.setting.feed, self.history, left, portion, pause_s)
        self._sent = len(self._records)
        return producer

    # -- the pipeline -----------------------------------------------------------------------------------------------

    def pipeline_file(self) -> Path:
        """The pipeline as a user would write it down."""
        s = self.setting
        source = s.feed.options()
        if s.workload.rows_per_batch is not None or "rows_per_batch" in self.extra:
            source["maxOffsetsPerTrigger"] = self.extra.get("rows_per_batch", s.workload.rows_per_batch)
        else:
            source["maxOffsetsPerTrigger"] = max(1, len(self._records) // 6)
        source |= self.extra.get("source", {})
        path = self.folder / "pipeline.yaml"
        if s.template is not None:
            own = s.template.filled(source, s.drain.options() | self.extra.get("sink", {}))
            own |= {"pipeline": s.name, "checkpoint": str(self.checkpoint), "trigger": "available_now"}
            own.setdefault("master", "local[2]")
            own |= {k: v for k, v in self.extra.items() if k == "master"}
            path.write_text(yaml.safe_dump(own, sort_keys=False), encoding="utf-8")
            return path
        data: dict[str, Any] = {
            "pipeline": s.name,
            "guarantee": s.guarantee.value,
            "checkpoint": str(self.checkpoint),
            "source": source,
            "transform": self._transform(),
            "sinks": [sink | self.extra.get("sink", {}) for sink in sinks_of(s.drain)],
            "trigger": self.extra.get("trigger", "available_now"),
            "master": self.extra.get("master", "local[2]"),
        }
        if "spark" in self.extra:
            data["spark"] = self.extra["spark"]
        path.write_text(yaml.safe_dump(data, sort_keys=False), encoding="utf-8")
        return path

    def _transform(self) -> dict[str, Any]:
        if self.sql:
            return {"sql": self.sql}
        workload = self.setting.workload
        if workload.python:
            return {"python": workload.python, "stateful": True, "deterministic": True}
        if workload.topics > 1:
            # A table has no topics: there both go into one.
            return (
                {"select": ["key", "value", "topic"], "arrow": self.arrow}
                if self.setting.drain.system == "kafka"
                else {"select": ["key", "value"]}
            )
        return {"select": ["key", "value"]} | ({"arrow": self.arrow} if self.arrow else {})

    def start(self, crash: str = "", *arguments: str) -> Run:
        """Start the pipeline, to stop at these points."""
        number = len(self.runs) + 1
        s = self.setting
        run = start(number, self.pipeline_file(), self.folder, crash, arguments, s.environment, s.service)
        run.started_s, run.after_kill = self.history.now_s, self._killed
        self._killed = False
        self.runs.append(run)
        self.history.add(run.name, "run", End.BEGUN, {"crash": crash, "arguments": arguments})
        return run

    def end(self, run: Run, timeout_s: float = END_TIMEOUT_S) -> str | None:
        """Wait until a run ends by itself; return the code of its error, None if it ended well."""
        try:
            run.wait_end(timeout_s)
        except TimeoutError:
            run.kill()
            self.history.add(run.name, "run", End.UNKNOWN, {"said": last_words(run)})
            raise
        value = {"code": run.code} if run.code is None else {"code": run.code, "said": last_words(run)}
        self.history.add(run.name, "run", End.OK if run.code is None else End.FAILED, value)
        return run.code

    def kill(self, run: Run) -> None:
        """SIGKILL a run and all its processes."""
        processes = run.kill()
        self._killed = True
        self.history.add(run.name, "run", End.UNKNOWN, {"killed": processes})

    def must_stop(self, *codes: str, arguments: Sequence[str] = (), when: str) -> str | None:
        """Start the pipeline where it is right to stop with one of these errors."""
        code = self.end(self.start("", *arguments))
        self.stops.append(Stop(codes, code, when))
        return code

    def drain(self, most: int = 4) -> None:
        """Start the pipeline without a fault until it ends well, at most so often; then everything is through."""
        code: str | None = "?"
        for _ in range(most):
            code = self.end(self.start())
            if code is None:
                break
        self.stops.append(Stop((), code, "at the end"))

    def fire(self, name: str, **facts: Any) -> None:
        """Note that a fault did happen."""
        self.history.add("fault", name, End.OK, facts)

    # -- facts ------------------------------------------------------------------------------------------------------

    def batches_logged(self) -> list[int]:
        """Batches that Spark logged as done."""
        folder = self.checkpoint / "commits"
        return sorted(int(p.name) for p in folder.glob("*") if p.name.isdigit()) if folder.exists() else []

    def batches_planned(self) -> list[int]:
        folder = self.checkpoint / "offsets"
        return sorted(int(p.name) for p in folder.glob("*") if p.name.isdigit()) if folder.exists() else []

    def wait(self, what: Callable[[], bool], text: str, timeout_s: float = HIT_TIMEOUT_S) -> None:
        wait_for(what, timeout_s, text)

    @property
    def broker(self) -> brokers.Broker:
        """
        Raises:
            Trouble: the cell has none.
        """
        if self.setting.broker is None:
            raise Trouble("NO_BROKER", f"The cell {self.setting.name} has no broker to restart.")
        return self.setting.broker

    @property
    def effects_seen(self) -> int:
        """How many effects the reader saw until now."""
        return len(self._seen)

    def all_seen(self) -> None:
        """Wait until the reader saw what is there: what it sees from now on is new."""
        there = len(self.setting.drain.read())
        self.wait(lambda: self.effects_seen >= there, f"the reader sees all {there} effects")

    def on_network_fault(self, hit: Fired) -> None:
        self.fire(hit.rule, api=hit.api, version=hit.version, client=hit.client)

    # -- evidence ---------------------------------------------------------------------------------------------------

    def evidence(self, required: Sequence[str], ordered: bool) -> Evidence:
        """Read source and sink at the end, stop the reader, and put together what there is to judge."""
        s = self.setting
        hanging: list[str] | None = None
        with suppress(TimeoutError):
            # The markers of transactions that were just ended arrive a moment later.
            self.wait(lambda: not s.drain.open_transactions(s.name), "open transactions end", _SETTLE_S)
        hanging = s.drain.open_transactions(s.name)
        source = s.feed.read()
        final = [self._as_seen(r) for r in s.drain.read()]
        self.history.add("final reader", "read", End.OK, {"effects": len(final)})
        self._stop_reading.set()
        self._reader.join(60)
        if self._reader_error is not None:
            raise Trouble("READER_DIED", f"The reader of cell {s.name} ended early: {self._reader_error}")
        ends = sends(self.history)
        by_record = s.template is None and s.workload.together is None
        return Evidence(
            guarantee=s.guarantee,
            expected=self._expected(source, final),
            acknowledged=frozenset(i for i, end in ends.items() if end is End.OK),
            in_source=Counter(self._source_id(r) for r in source),
            offered=frozenset(ends),
            seen=self._seen,
            final=final,
            snapshots=self._snapshots,
            batches=self._batches(source) if by_record else None,
            # Which rows of an own transform, or of one with state, make a batch cannot be told from outside.
            batch_atomic=s.drain.batch_atomic and by_record,
            ordered=ordered,
            given_up=self._audited("counts", "given_up"),
            audit_verdict=self.audited["verdict"] if self.audited else None,
            open_transactions=hanging,
            required=required,
            fired=fired(self.history),
            stops=self.stops,
            stays_down=self.stays_down,
            recovery_s=self._recoveries(),
            plain_s=s.plain_s,
        )

    def audit(self) -> None:
        """Ask the product itself, by `delivered audit`: a second opinion, and the count of what was given up."""
        self.audited = self.setting.service.audit(self.pipeline_file(), self.folder, self.setting.environment)
        self.history.add("audit", "audit", End.OK, {k: self.audited[k] for k in ("verdict", "counts")})

    def _audited(self, *path: str) -> int | None:
        found: Any = self.audited
        for part in path:
            found = found.get(part) if isinstance(found, dict) else None
        return found if isinstance(found, int) else None

    def _expected(self, source: Sequence[Row], final: Sequence[Seen]) -> Counter[str]:
        template, workload = self.setting.template, self.setting.workload
        if template is None and workload.together is not None:
            return Counter(workload.told_by(None, v).id for v in workload.together([r.value for r in source]))
        if template is None:
            return Counter(e for r in source for e in self._effects(r))
        if template.reference is None:
            template.reference = Counter(s.effect for s in final)
        return template.reference

    def _source_id(self, row: Row) -> str:
        return source_id(row.value) if self.setting.template is None else whole(row.key, row.value).id

    def _record_id(self, record: Record) -> str:
        return record.id if self.setting.template is None else whole(record.key, record.value).id

    def first_effect_s(self) -> float | None:
        """Seconds from the first start to the first effect that the reader saw."""
        return self._visible_after(self.runs[0], None) if self.runs else None

    def plain_restart_s(self) -> float | None:
        """The same of the last start, in a cell whose runs all ended by themselves; None: there was none."""
        plain = [r for r in self.runs[1:] if not r.after_kill]
        return self._visible_after(plain[0], None) if plain else None

    def _recoveries(self) -> list[float]:
        """From each start after a SIGKILL of the driver to the first effect seen after it, if that came before the next
        start."""
        found = [
            self._visible_after(run, after)
            for run, after in itertools.zip_longest(self.runs, self.runs[1:])
            if run.after_kill
        ]
        return [s for s in found if s is not None]

    def _visible_after(self, run: Run, next_run: Run | None) -> float | None:
        first = next((s.at_s for s in self._seen if s.at_s > run.started_s), None)
        if first is None or (next_run is not None and first > next_run.started_s):
            return None
        return round(first - run.started_s, 2)

    def _effects(self, row: Row) -> list[str]:
        workload = self.setting.workload
        found = [workload.told_by(row.key, v).id for v in workload.effects(row.value)]
        return [at_sink(sink, effect) for sink in names_of(self.setting.drain) for effect in found]

    def _as_seen(self, row: Row) -> Seen:
        effect = self.setting.workload.told_by(row.key, row.value)
        lane = at_sink(row.sink, row.lane)
        return Seen(at_sink(row.sink, effect.id), lane, row.position, effect.key, effect.number, self.history.now_s)

    def _read_all_along(self) -> None:
        def seen(look: Look) -> None:
            found = [self._as_seen(r) for r in look.rows]
            self._seen.extend(found)
            if look.whole:
                self._visible |= {s.effect for s in found}
                self._snapshots.append((self.history.now_s, frozenset(self._visible)))
            self.history.add("reader", "read", End.OK, {"effects": len(found), "all": len(self._seen)})

        try:
            self.setting.drain.follow(seen, self._stop_reading)
        except Exception as error:
            self._reader_error = f"{type(error).__name__}: {error}"

    def _batches(self, source: Sequence[Row]) -> dict[int, frozenset[str]] | None:
        """Effects of each batch that the checkpoint still knows; None if it has a gap."""
        ends: dict[int, dict[str, int]] = {}
        for number in self.batches_planned():
            lines = (self.checkpoint / "offsets" / str(number)).read_text(encoding="utf-8").splitlines()
            ends[number] = self.setting.feed.offsets(json.loads(lines[2]))
        if not ends or list(ends) != list(range(len(ends))):
            return None
        found: dict[int, set[str]] = {n: set() for n in ends}
        for row in source:
            batch = next((n for n, end in ends.items() if row.position < end.get(row.lane, 0)), None)
            if batch is not None:
                found[batch] |= set(self._effects(row))
        return {n: frozenset(effects) for n, effects in found.items()}


def empty(folder: Path) -> None:
    """Take a cell's earlier files away, and a small disk that a verifier that was killed left mounted."""
    for disk in [p for p in folder.glob("*") if p.is_mount()]:
        subprocess.run(["umount", "-l", str(disk)], check=True)
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
