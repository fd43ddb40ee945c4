"""One case of the matrix, from its names to its verdict, and where it runs: a folder, servers started on first use, and
small disks."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import subprocess
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from delivered import DeliveredError, Guarantee
from delivered_lab import brokers
from delivered_lab.verify.evidence import fired
from delivered_lab.verify.faults import MOUNT, PROXY, TOPICS, Fault
from delivered_lab.verify.fixture import Fixture, Setting, empty
from delivered_lab.verify.gather import first_effect_s, gather, plain_restart_s
from delivered_lab.verify.judge import Judgement, Verdict, differences, judge
from delivered_lab.verify.proxy import Fired, Proxy, StreamProxy
from delivered_lab.verify.services import SERVICES, SPARK
from delivered_lab.verify.systems import KAFKA, SINK_KINDS, SOURCE_KINDS, SYSTEMS
from delivered_lab.verify.systems.base import SinkClient, SinkPlace, SourcePlace
from delivered_lab.verify.systems.group import GroupClient
from delivered_lab.verify.template import Template
from delivered_lab.verify.workloads import WORKLOADS

DISK_MB = 24
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
    """

    folder: Path
    say: Say
    env: dict[str, str] = field(default_factory=dict)
    sink_options: dict[str, Any] = field(default_factory=dict)
    template: Template | None = None
    source_format: str | None = None
    variant: str = ""
    _servers: dict[str, brokers.Broker] = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        if self.template is not None:
            paths = [str(self.template.folder), self.env.get("PYTHONPATH", os.environ.get("PYTHONPATH", ""))]
            self.env = {**self.env, "PYTHONPATH": os.pathsep.join(p for p in paths if p)}

    def server(self, kind: str) -> brokers.Broker:
        """This environment's server, started on first use; `kind` as named by `delivered_lab.brokers`."""
        if kind not in self._servers:
            place = self._place(kind)
            shutil.rmtree(place, ignore_errors=True)
            self.say(f"starting {kind}")
            properties = dict(SYSTEMS[kind].properties)
            self._servers[kind] = brokers.start(kind, place, properties=properties, dies_with_parent=True)
        return self._servers[kind]

    def close(self) -> None:
        while self._servers:
            kind, server = self._servers.popitem()
            server.kill()
            shutil.rmtree(self._place(kind), ignore_errors=True)

    def _place(self, kind: str) -> Path:
        return self.folder / ("broker" if kind == KAFKA else kind)


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
