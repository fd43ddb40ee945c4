"""One case of the matrix, from its names to its verdict, and where it runs: a folder, servers started on first use, and
small disks.

Once everything has ended, `gather` collects the evidence: what went in, what came out, how runs ended. The expected
content of the sink follows from what *is* in the source at the end, and what a script saw it lose. A queue is empty
then, so it follows from what was sent: acknowledged messages must be there once, by id; the others once or not at all.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import os
import shutil
import subprocess
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from delivered import DeliveredError, Guarantee
from delivered_lab import brokers
from delivered_lab.verify.ahead import Drivers
from delivered_lab.verify.evidence import End, Evidence, Seen, fired, sends
from delivered_lab.verify.faults import MOUNT, PROXY, TOPICS, Fault
from delivered_lab.verify.fixture import Fixture, Setting, Template, empty, row_effect
from delivered_lab.verify.judge import Judgement, Verdict, differences, judge
from delivered_lab.verify.provenance import ran, versions
from delivered_lab.verify.proxy import Fired, Proxy, StreamProxy
from delivered_lab.verify.services import SERVICES, SPARK, Run, VerifierError
from delivered_lab.verify.systems import KAFKA, SINK_KINDS, SOURCE_KINDS, SYSTEMS, GroupClient, at_sink, sink_names
from delivered_lab.verify.systems.base import QueueSource, Row, SinkClient, SinkPlace, SourcePlace
from delivered_lab.verify.workloads import WORKLOADS, source_id

DISK_MB = 24
AHEAD = "ahead"
NAME_LENGTH_MAX = 64
"""Of a pipeline."""


@dataclass(frozen=True)
class Case:
    """What to run: sink, guarantee, workload, fault and seed.

    Attributes:
        source: empty: the sink's default source.
    """

    sink: str
    guarantee: Guarantee
    workload: str
    fault: Fault
    seed: int
    service: str = SPARK
    source: str = ""

    @property
    def name(self) -> str:
        """Short enough for a pipeline name."""
        short = {"exactly_once": "eo", "at_least_once": "alo", "at_most_once": "amo"}[self.guarantee.value]
        from_source = f"{self.source.replace('_', '-')}-" if self.source else ""
        name = f"{from_source}{self.sink}-{short}-{self.workload}-{self.fault.name}-{self.service[0]}{self.seed}"
        if len(name) <= NAME_LENGTH_MAX:
            return name
        return f"{name[: NAME_LENGTH_MAX - 9]}-{hashlib.blake2b(name.encode(), digest_size=4).hexdigest()}"

    @property
    def key(self) -> tuple[Any, ...]:
        return (self.sink, self.guarantee.value, self.workload, self.fault.name, self.seed, self.service, self.source)


@dataclass
class Result:
    """The result of a case. The first ten fields are the format that others read.

    Attributes:
        source: empty: the sink's default source.
        plain_s: seconds from a plain restart to its first effect: of this case if it killed nothing, else of the
            baseline that recovery is compared with.
        missing, extra, different: keys of an operator's rows, against its oracle.
        parts: failure point -> faults that fired there, if the case passes several; `place` is then one of them.
        start: "ahead": drivers that were started before took runs of the last run; empty: each run was a process of its
            own.
        ran: each run of the case that is on record, the last one last: time, commit, code, verdict (`provenance.Ran`).
        versions: of packages and servers in the last run.
        recovery_s: the same for each restart after a SIGKILL of the driver; recovery: their verdict, separate from the
            case's.
    """

    sink: str
    guarantee: str
    workload: str
    fault: str
    seed: int
    verdict: str
    lost: int
    duplicated: int
    fired: int
    final_read: bool
    service: str = SPARK
    source: str = ""
    place: str = ""
    text: str = ""
    reasons: list[str] = field(default_factory=list)
    findings: list[dict[str, Any]] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)
    parts: dict[str, int] = field(default_factory=dict)
    stops: list[dict[str, Any]] = field(default_factory=list)
    undelivered: int = 0
    missing: int = 0
    extra: int = 0
    different: int = 0
    sent: int = 0
    delivered: int = 0
    given_up: int | None = None
    runs: int = 0
    seconds: float = 0.0
    first_effect_s: float | None = None
    plain_s: float | None = None
    recovery_s: list[float] = field(default_factory=list)
    recovery: str = ""
    folder: str = ""
    again: str = ""
    start: str = ""
    ran: list[list[str]] = field(default_factory=list)
    versions: dict[str, str] = field(default_factory=dict)

    @property
    def key(self) -> tuple[Any, ...]:
        return (self.sink, self.guarantee, self.workload, self.fault, self.seed, self.service, self.source)

    @property
    def between(self) -> str:
        """The sink, with the source if one was chosen."""
        return f"{self.source} to {self.sink}" if self.source else self.sink

    def fired_at(self, place: str) -> int | None:
        """Faults that fired at a failure point; None: the case does not pass it."""
        return (self.parts or {self.place: self.fired}).get(place)

    def record(self, servers: Iterable[str]) -> None:
        """Keep that it ran now, with these servers."""
        self.ran = [ran(self.service, self.sink, self.source, self.verdict).to_json()]
        self.versions = versions(frozenset(servers))

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    def save(self) -> None:
        """Next to the case's history."""
        (Path(self.folder) / "result.json").write_text(json.dumps(self.to_json(), indent=1), encoding="utf-8")

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Result:
        known = cls.__dataclass_fields__
        return cls(**{k: v for k, v in data.items() if k in known})


def run_case(case: Case, environment: Environment, *, plain_s: float | None = None, audit: bool = False) -> Result:
    """Run and judge a case. An error in judging gives unknown, never a pass.

    Args:
        plain_s: time to the first effect of a plain restart; None: unknown.
        audit: also run `delivered audit`. Under at_most_once it always runs, to count what was given up.
    """
    started_s = time.monotonic()
    folder = environment.folder / case.name
    empty(folder)
    environment.next_case()
    fixture: Fixture | None = None
    with contextlib.ExitStack() as stack:

        def judged() -> Judgement:
            nonlocal fixture
            opened = stack.enter_context(_fixture(case, environment, folder, plain_s, stack))
            judgement = _run(case, opened, audit)
            fixture = opened
            return judgement

        judgement = unknown_on_error(folder, judged)
        result = build_result(case, folder, started_s, judgement)
        if fixture is None:
            return result
        _add_facts(case, result, fixture)
        if judgement.verdict is Verdict.HELD:
            with contextlib.suppress(Exception):
                fixture.setting.sink.remove()
    result.save()
    if judgement.verdict is Verdict.HELD:
        _tidy(folder)
    return result


def unknown_on_error(folder: Path, judged: Callable[[], Judgement]) -> Judgement:
    """A judgement; unknown if the verifier could not go on."""
    try:
        return judged()
    except Exception as error:
        (folder / "judge.log").write_text(traceback.format_exc(), encoding="utf-8")
        text = str(error) if isinstance(error, DeliveredError) else f"{type(error).__name__}: {error}"
        return Judgement(Verdict.UNKNOWN, (), (f"the verifier could not go on: {text}",))


def _run(case: Case, fixture: Fixture, audit: bool) -> Judgement:
    fixture.open()
    case.fault.script(fixture)
    if (audit or case.guarantee is Guarantee.AT_MOST_ONCE) and not fixture.stays_down:
        fixture.audit()
    ordered = fixture.setting.workload.ordered and case.fault.keeps_order and SINK_KINDS[case.sink].ordered
    if case.source:
        ordered = ordered and SOURCE_KINDS[case.source].ordered
    fixture.result = gather(fixture, case.fault.requires, ordered)
    return judge(fixture.result)


@contextlib.contextmanager
def _fixture(
    case: Case, environment: Environment, folder: Path, plain_s: float | None, stack: contextlib.ExitStack
) -> Iterator[Fixture]:
    disk = folder
    if MOUNT in case.fault.needs:
        disk = stack.enter_context(small_disk(folder / "disk", DISK_MB))
    fixture = Fixture(
        _setting(case, environment, folder, disk, plain_s, stack, lambda hit: fixture.on_network_fault(hit))
    )
    try:
        yield fixture
    finally:
        fixture.close()
        if disk is not folder:  # else a server would lose part of its data along with the disk
            with contextlib.suppress(Exception):
                fixture.setting.sink.remove()


def _setting(
    case: Case,
    environment: Environment,
    folder: Path,
    disk: Path,
    plain_s: float | None,
    stack: contextlib.ExitStack,
    on_fire: Callable[[Fired], None],
) -> Setting:
    """Source, sink and network of the case.

    Args:
        disk: for the checkpoint and the sink's files: the folder, or a small disk of its own.
        on_fire: called by a proxy for each request that a rule hit.
        stack: closes the proxy.
    """
    needs, template, kind = case.fault.needs, environment.template, SINK_KINDS[case.sink]
    workload = template.workload if template is not None else WORKLOADS[case.workload]
    options = {**workload.sink_options(kind.upserts), **environment.sink_options}
    own = SOURCE_KINDS[template.source if template is not None else kind.source]
    topics = TOPICS in needs or workload.topics > 1
    source = SOURCE_KINDS[case.source or (KAFKA if topics and own.server != KAFKA else own.name)]

    def server_of(kind: str | None) -> brokers.Broker | None:
        return None if kind is None else environment.server(kind)

    server = server_of(kind.server)
    proxy: Proxy[Any] | None = None
    if PROXY in needs and server is not None:
        proxy = (SYSTEMS[server.kind].proxy or StreamProxy)(server.bootstrap, on_fire)
        stack.callback(proxy.close)

    def address(of: str | None) -> str | None:
        """The proxy's address if it serves this server: the one of the sink, even in a group."""
        return proxy.bootstrap if proxy is not None and of == kind.server else None

    def client(name: str) -> SinkClient:
        one = SINK_KINDS[name]
        if one.client is None:
            return GroupClient({m: client(m) for m in one.members})
        small = disk if disk is not folder and name == case.sink else None
        at, typed = server_of(one.server), template is None
        return one.client(one, SinkPlace(case.name, at, disk, address(one.server), workload, typed, small, options))

    source_server = server_of(source.server)
    # Only Kafka as the sink's own source is reached through its proxy.
    through = address(source.server) if source.server == KAFKA else None
    log, connector = folder / "log", environment.source_format
    return Setting(
        name=case.name,
        folder=folder,
        guarantee=case.guarantee,
        workload=workload,
        seed=case.seed,
        source=source.at(SourcePlace(case.name, source_server, log, through, workload.topics, connector)),
        sink=client(case.sink),
        checkpoint=disk / "checkpoint",
        extra=dict(case.fault.extra),
        proxy=proxy,
        broker=server or source_server,
        source_broker=source_server,
        plain_s=plain_s,
        env=environment.env,
        service=SERVICES[case.service],
        drivers=environment.drivers if case.service == SPARK else None,
        template=template,
    )


def build_result(case: Case, folder: Path, started_s: float, judgement: Judgement) -> Result:
    names = f"{case.sink}/{case.guarantee.value}/{case.workload}/{case.fault.name}"
    source = f" --source {case.source}" if case.source else ""
    return Result(
        sink=case.sink,
        guarantee=case.guarantee.value,
        workload=case.workload,
        fault=case.fault.name,
        seed=case.seed,
        verdict=judgement.verdict.value,
        lost=judgement.count("lost"),
        duplicated=judgement.count("duplicated"),
        fired=0,
        final_read=False,
        service=case.service,
        source=case.source,
        place=case.fault.place,
        text=case.fault.text,
        reasons=list(judgement.reasons),
        findings=[f.to_json() for f in judgement.findings],
        seconds=round(time.monotonic() - started_s, 1),
        folder=str(folder),
        again=f"delivered verify --only {names} --seed {case.seed} --service {case.service}{source}",
    )


def _add_facts(case: Case, result: Result, fixture: Fixture) -> None:
    evidence = fixture.result
    if evidence is None:
        return
    if evidence.stays_down:  # nothing was skipped: the remaining records are still in the source
        result.lost, result.undelivered = 0, result.lost
    if evidence.final is not None and not evidence.stays_down:
        by_key = {what: len(texts) for what, texts in differences(evidence).items()}
        result.missing, result.extra, result.different = (by_key.get(w, 0) for w in ("missing", "extra", "different"))
    result.faults = fired(fixture.history)
    result.fired = len(result.faults)
    result.parts = {p: sum(name in names for name in result.faults) for p, names in case.fault.parts.items()}
    result.final_read = evidence.final is not None
    result.sent = evidence.expected.total()
    result.delivered = Counter(s.effect for s in evidence.final or ()).total()
    result.given_up = evidence.given_up
    result.stops = [{"when": s.when, "wanted": list(s.wanted), "got": s.got} for s in evidence.stops]
    result.runs = len(fixture.runs)
    result.first_effect_s = first_effect_s(fixture)
    result.recovery_s = list(evidence.recovery_s)
    result.start = AHEAD if any(r.ahead for r in fixture.runs) else ""
    if result.start != AHEAD:
        result.again += " --fresh" if case.service == SPARK else ""
        result.plain_s = plain_restart_s(fixture) if result.fault == "none" else evidence.plain_s
    result.recovery = next((str(f["verdict"]) for f in result.findings if f["checker"] == "recovery"), "")


def _tidy(folder: Path) -> None:
    """Keep only history and output of a case that held; delete data and checkpoints."""
    for name in ("checkpoint", "checkpoint.older", "checkpoint.newest", "checkpoint.kept", "log", "disk", "effects"):
        shutil.rmtree(folder / name, ignore_errors=True)
    for path in [*folder.glob("effects.db*"), *folder.glob("*.spark.log")]:
        shutil.rmtree(path) if path.is_dir() else path.unlink()


Say = Callable[[str], None]


@dataclass
class Environment:
    """Runs cases one after the other.

    Attributes:
        env: for the pipelines' processes.
        sink_options: override the options of every sink in the pipeline file; `format` replaces the connector.
        template: the user's own pipeline, run by every case.
        source_format: a connector that replaces the one of every queue.
        variant: what the programs of both ends do wrong on purpose; empty: nothing.
        ahead: runs through Spark are handed to drivers that were started before; else each is a process of its own.
    """

    folder: Path
    say: Say
    env: dict[str, str] = field(default_factory=dict)
    sink_options: dict[str, Any] = field(default_factory=dict)
    template: Template | None = None
    source_format: str | None = None
    variant: str = ""
    ahead: bool = False
    drivers: Drivers | None = field(default=None, init=False)
    used: set[str] = field(default_factory=set, init=False)
    _servers: dict[str, brokers.Broker] = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        if self.template is not None:
            paths = [str(self.template.folder), self.env.get("PYTHONPATH", os.environ.get("PYTHONPATH", ""))]
            self.env = {**self.env, "PYTHONPATH": os.pathsep.join(p for p in paths if p)}
        if self.ahead:
            self.drivers = Drivers(self.folder / "drivers", self.env)

    def server(self, kind: str) -> brokers.Broker:
        """This environment's server, started on first use; `kind` as named by `delivered_lab.brokers`."""
        self.used.add(kind)
        if kind not in self._servers:
            place = self._place(kind)
            shutil.rmtree(place, ignore_errors=True)
            self.say(f"starting {kind}")
            properties = dict(SYSTEMS[kind].properties)
            self._servers[kind] = brokers.start(kind, place, properties=properties, dies_with_parent=True)
        return self._servers[kind]

    def next_case(self) -> None:
        """Before a case: servers that an earlier one left dead or silent start again, empty, when they are used."""
        if self.drivers is not None:
            self.drivers.next_case()
        for kind in [kind for kind in self._servers if not _answers(self._place(kind))]:
            self._servers.pop(kind).kill()

    def close(self) -> None:
        if self.drivers is not None:
            self.drivers.close()
        while self._servers:
            kind, server = self._servers.popitem()
            server.kill()
            shutil.rmtree(self._place(kind), ignore_errors=True)

    def _place(self, kind: str) -> Path:
        return self.folder / ("broker" if kind == KAFKA else kind)


_ANSWER_S_MAX = 30.0


def _answers(folder: Path) -> bool:
    """Whether the folder's server answers; waits for one that runs, which may be busy."""
    deadline = time.monotonic() + _ANSWER_S_MAX
    while (now := brokers.status(folder)).running and not now.answering and time.monotonic() < deadline:
        time.sleep(0.2)
    return now.answering


def can_mount() -> bool:
    """Whether this process may mount a small disk."""
    return os.geteuid() == 0 and shutil.which("mount") is not None


@contextlib.contextmanager
def small_disk(folder: Path, megabytes: int) -> Iterator[Path]:
    """A disk of its own for a folder, unmounted on exit."""
    folder.mkdir(parents=True, exist_ok=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={megabytes}m", "tmpfs", str(folder)], check=True)
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=False)


_SETTLE_S = 15.0


def gather(fixture: Fixture, required: Sequence[str], ordered: bool) -> Evidence:
    """Read source and sink at the end, stop the reader, and build the evidence.

    Raises:
        VerifierError: the reader ended early.
    """
    s = fixture.setting
    with suppress(TimeoutError):
        # The markers of transactions that just ended arrive a moment later.
        fixture.wait(lambda: not s.sink.open_transactions(s.name), "open transactions end", _SETTLE_S)
    hanging = s.sink.open_transactions(s.name)
    source = [*s.source.read(), *fixture.lost]
    final = fixture.reader.as_seen(s.sink.read())
    fixture.history.add("final reader", "read", End.OK, {"effects": len(final)})
    fixture.reader.close()
    fixture.reader.check()
    ends = sends(fixture.history)
    by_record = s.template is None and s.workload.together is None and s.workload.oracle is None
    results = _results(fixture, source, final)
    return Evidence(
        guarantee=s.guarantee,
        expected=_expected_of_sent(fixture, ends, final)
        if isinstance(s.source, QueueSource)
        else _expected(fixture, source, final)
        if results is None
        else results.expected,
        wanted=results.wanted if results is not None else None,
        states=results.states if results is not None else None,
        acknowledged=frozenset(i for i, end in ends.items() if end is End.OK),
        in_source=Counter(
            source_id(r.value) if fixture.setting.template is None else row_effect(r.key, r.value).id for r in source
        ),
        offered=frozenset(ends),
        seen=fixture.reader.seen,
        final=final,
        snapshots=fixture.reader.snapshots,
        batches=_batches(fixture, source) if by_record else None,
        # The rows that a custom or stateful transform makes of a batch cannot be known from outside.
        batch_atomic=s.sink.batch_atomic and (by_record or (results is not None and results.states is not None)),
        ordered=ordered,
        given_up=_audited(fixture, "counts", "given_up"),
        audit_verdict=fixture.audited["verdict"] if fixture.audited else None,
        open_transactions=hanging,
        required=required,
        fired=fired(fixture.history),
        stops=[*(fixture.receiving.stops if fixture.receiving is not None else ()), *fixture.stops],
        stays_down=fixture.stays_down,
        recovery_s=_recoveries(fixture),
        plain_s=s.plain_s,
    )


def first_effect_s(fixture: Fixture) -> float | None:
    """Seconds from the first start to the first effect seen by the reader."""
    return _visible_after(fixture, fixture.runs[0], None) if fixture.runs else None


def plain_restart_s(fixture: Fixture) -> float | None:
    """The same for the last start, in a case whose runs all ended by themselves; None: there was none."""
    plain = [r for r in fixture.runs[1:] if not r.after_kill]
    return _visible_after(fixture, plain[0], None) if plain else None


def _audited(fixture: Fixture, *path: str) -> int | None:
    found: Any = fixture.audited
    for part in path:
        found = found.get(part) if isinstance(found, dict) else None
    return found if isinstance(found, int) else None


def _expected(fixture: Fixture, source: Sequence[Row], final: Sequence[Seen]) -> Counter[str]:
    template, workload = fixture.setting.template, fixture.setting.workload
    if template is None and workload.together is not None:
        return Counter(workload.effect_of(None, v).id for v in workload.together([r.value for r in source]))
    if template is None:
        found = Counter(e for r in source for e in _effects(fixture, r.key, r.value))
        # One row per key, however often the source has it.
        return Counter(dict.fromkeys(found, 1)) if workload.replaces else found
    if template.reference is None:
        template.reference = Counter(s.effect for s in final)
    return template.reference


@dataclass(frozen=True)
class _Results:
    """See `Evidence`."""

    expected: Counter[str]
    wanted: dict[str, str]
    states: list[frozenset[str]] | None


def _results(fixture: Fixture, source: Sequence[Row], final: Sequence[Seen]) -> _Results | None:
    """The oracle's answer, if the workload has one: for all records, and in output mode update for every prefix of the
    batches.

    Raises:
        VerifierError: in output mode update, the checkpoint has already dropped batches.
    """
    workload = fixture.setting.workload
    if workload.oracle is None:
        return None

    def rows(found: Mapping[str, str]) -> dict[str, str]:
        return {k: workload.effect_of(k, v).id for k, v in found.items()}

    wanted = rows(workload.oracle([r.value for r in source]))
    if workload.accepts is not None:
        for s in final:
            value, prefix = wanted.get(s.key or ""), f"{s.key} = "
            if value is not None and workload.accepts(value.removeprefix(prefix), s.effect.removeprefix(prefix)):
                wanted[s.key or ""] = s.effect
    if workload.output_mode == "append":
        return _Results(Counter(wanted.values()), wanted, None)
    batches = _by_batch(fixture, source)
    if batches is None:
        raise VerifierError("BATCHES_UNKNOWN", case=fixture.setting.name)
    parts = [[r.value for b in batches[: n + 1] for r in b] for n in range(len(batches))]
    states = [frozenset(rows(workload.oracle(part)).values()) for part in parts]
    if fixture.reader.upserted:
        return _Results(Counter(wanted.values()), wanted, states)
    changes = [now - before for before, now in itertools.pairwise([frozenset[str](), *states])]
    return _Results(Counter(c for part in changes for c in part), wanted, None)


def _expected_of_sent(fixture: Fixture, ends: dict[str, End], final: Sequence[Seen]) -> Counter[str]:
    """Each id once: a resend by the sender is for the receiver to deduplicate."""
    there = {s.effect for s in final}
    found = Counter[str]()
    for record in {r.id: r for r in fixture.records}.values():
        effects = Counter(_effects(fixture, record.key, record.value))
        end = ends.get(record.id)
        if end is End.OK or (end is End.UNKNOWN and there & effects.keys()):
            found += effects
    return found


def _effects(fixture: Fixture, key: str | None, value: str) -> list[str]:
    workload = fixture.setting.workload
    found = [workload.effect_of(key, v).id for v in workload.effects(value)]
    return [at_sink(sink, effect) for sink in sink_names(fixture.setting.sink) for effect in found]


def _recoveries(fixture: Fixture) -> list[float]:
    """From each start after a SIGKILL of the driver to the first effect after it, if it came before the next start.
    None of a driver that was started ahead: some have a JVM that has run queries before."""
    found = [
        _visible_after(fixture, run, after)
        for run, after in itertools.zip_longest(fixture.runs, fixture.runs[1:])
        if run.after_kill and not run.ahead
    ]
    return [s for s in found if s is not None]


def _visible_after(fixture: Fixture, run: Run, next_run: Run | None) -> float | None:
    first = next((s.at_s for s in fixture.reader.seen if s.at_s > run.started_s), None)
    if first is None or (next_run is not None and first > next_run.started_s):
        return None
    return round(first - run.started_s, 2)


def _batches(fixture: Fixture, source: Sequence[Row]) -> dict[int, frozenset[str]] | None:
    """Effects of each batch that the checkpoint still has; None if it has a gap."""
    batches = _by_batch(fixture, source)
    if batches is None:
        return None
    return {n: frozenset(e for r in rows for e in _effects(fixture, r.key, r.value)) for n, rows in enumerate(batches)}


def _by_batch(fixture: Fixture, source: Sequence[Row]) -> list[list[Row]] | None:
    """Records of each batch from 0 on; None if the checkpoint has a gap."""
    ends: dict[int, dict[str, int]] = {}
    for number in fixture.batches_planned():
        lines = (fixture.checkpoint / "offsets" / str(number)).read_text(encoding="utf-8").splitlines()
        ends[number] = fixture.setting.source.offsets(json.loads(lines[2]))
    if not ends or list(ends) != list(range(len(ends))):
        return None
    found: list[list[Row]] = [[] for _ in ends]
    for row in source:
        batch = next((n for n, end in ends.items() if row.position < end.get(row.partition, 0)), None)
        if batch is not None:
            found[batch].append(row)
    return found
