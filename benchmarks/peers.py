"""The same workload, kills and judges for `delivered` and for what a user would take instead.

    python -m benchmarks.peers                     all of them, three seeds, into docs/peers.json and docs/peers.md
    python -m benchmarks.peers --peer quix-alo     one of them; results of the others are kept
    python -m benchmarks.peers --again             also what has a result already

Peers that are no part of our own environment are installed into build/peers-env and build/flink-env, once. Each peer is
judged by what it states itself; what was seen is reported either way.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import origin
from benchmarks.cases import SPARK_KAFKA_JARS
from delivered.model.capability import Guarantee
from delivered_lab.brokers.kafka import VERSION as KAFKA_VERSION
from delivered_lab.verify.case import Case, Environment, Result, run_case
from delivered_lab.verify.evidence import Stop
from delivered_lab.verify.faults import BROKER, Fault
from delivered_lab.verify.fixture import HIT_TIMEOUT_S, Fixture
from delivered_lab.verify.matrix import FORMAT, read_results, write_file
from delivered_lab.verify.provenance import versions
from delivered_lab.verify.scripts import Script
from delivered_lab.verify.services import SERVICES, SPARK, Service
from delivered_lab.verify.systems import KAFKA

BUILD = Path("build")
PAGE = Path(__file__).parents[1] / "docs" / "peers.md"
STORED = PAGE.with_suffix(".json")
_NOT_STORED = ("findings", "faults", "stops", "folder", "again")
APPS = Path(__file__).parent / "peer_apps"
PACKAGES = ("quixstreams==3.28.1", "bytewax[kafka]==0.21.1", "pyyaml")
FLINK_PACKAGES = ("apache-flink==2.3.0", "confluent-kafka", "pyyaml", "setuptools<81")
FLINK_JARS = (("org.apache.flink", "flink-sql-connector-kafka", "5.0.0-2.2"),)
RECORD_S = 0.003
"""What a record takes in peers that would copy all of them before anybody could kill them."""
KILLS = 4
EXPIRY_S = 150.0
"""Above the time-out of transactions that any of them sets, but for Flink's, whose restart ends its own."""
_blocked_s: dict[str, float] = {}
"""Case -> how long committed readers were held up when all was done."""
_BATCH = {"rows_per_batch": 60}


@dataclass(frozen=True)
class Peer:
    """
    Attributes:
        states: its own guarantee, from its documentation.
        command: pipeline file -> what to start.
    """

    name: str
    text: str
    states: Guarantee
    command: Callable[[Path], list[str]] | None


def _jars() -> Path:
    from delivered_lab.brokers.servers import fetch_jars

    return fetch_jars("spark-kafka/4.2.0", SPARK_KAFKA_JARS, print, transitive=False)


def _environment(name: str = "peers-env", packages: Sequence[str] = PACKAGES) -> Path:
    """The interpreter of an environment of the peers' own."""
    folder = BUILD / name
    python = folder / "bin" / "python"
    if not (folder / ".ready").exists():
        subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
        subprocess.run([str(python), "-m", "pip", "install", "--quiet", *packages], check=True)
        (folder / ".ready").touch()
    return python


def _spark_own(pipeline: Path) -> list[str]:
    return [sys.executable, str(APPS / "spark_own.py"), str(pipeline), str(_jars())]


def flink() -> tuple[str, str, str]:
    """Flink's interpreter, the folder of its Kafka connector, and the Java for it; installed once."""
    from delivered.machine import java_home
    from delivered_lab.brokers.servers import fetch_jars

    java = java_home()
    jars = fetch_jars("flink-kafka/5.0.0-2.2", FLINK_JARS, print, transitive=False)
    return str(_environment("flink-env", FLINK_PACKAGES)), str(jars), str(java)


def _flink(pipeline: Path) -> list[str]:
    python, *places = flink()
    return [python, str(APPS / "flink_copy.py"), str(pipeline), str(RECORD_S), *places]


def _quix(pipeline: Path) -> list[str]:
    return [str(_environment()), str(APPS / "quix.py"), str(pipeline), str(RECORD_S)]


def _bytewax(pipeline: Path) -> list[str]:
    return [str(_environment()), str(APPS / "bytewax_copy.py"), str(pipeline), str(RECORD_S)]


EXACTLY, AT_LEAST = Guarantee.EXACTLY_ONCE, Guarantee.AT_LEAST_ONCE
PEERS = {
    p.name: p
    for p in (
        Peer("delivered-eo", "delivered, exactly_once, on Spark", EXACTLY, None),
        Peer("delivered-alo", "delivered, at_least_once, on Spark", AT_LEAST, None),
        Peer("own-sink", "Spark's own Kafka sink 4.2.0", AT_LEAST, _spark_own),
        Peer("flink-eo", "Flink 2.3.0, Kafka sink 5.0.0-2.2, exactly-once", EXACTLY, _flink),
        Peer("flink-alo", "Flink 2.3.0, Kafka sink 5.0.0-2.2, at-least-once", AT_LEAST, _flink),
        Peer("quix-eo", "Quix Streams 3.28.1, exactly-once", EXACTLY, _quix),
        Peer("quix-alo", "Quix Streams 3.28.1, at-least-once", AT_LEAST, _quix),
        Peer("wax", "Bytewax 0.21.1, Kafka sink with recovery", AT_LEAST, _bytewax),
    )
}


# -- faults that ask nothing of the product: no crash points, no checkpoint layout -------------------------------------


def _works(fixture: Fixture) -> Any:
    """Start it, and wait until a reader sees something new, or it ended."""
    seen = fixture.effects_seen
    run = fixture.start()
    fixture.wait(lambda: not run.lives or fixture.effects_seen > seen, "something new is visible", HIT_TIMEOUT_S)
    return run


def _pause(fixture: Fixture, seconds: float) -> None:
    until = time.monotonic() + seconds
    fixture.wait(lambda: time.monotonic() >= until, "the moment comes")


def _settled(fixture: Fixture) -> None:
    """Until a transaction that a killed process left open has expired, and committed readers come to the end."""
    began = time.monotonic()
    with contextlib.suppress(TimeoutError):
        fixture.wait(
            lambda: not fixture.setting.sink.open_transactions(fixture.setting.name), "readers reach the end", EXPIRY_S
        )
    _blocked_s[fixture.setting.name] = round(time.monotonic() - began, 1)


def undisturbed(fixture: Fixture) -> None:
    fixture.send(0.5)
    fixture.stops.append(Stop((), fixture.end(fixture.start()), "the first half"))
    fixture.send()
    fixture.drain()


def killed(fixture: Fixture) -> None:
    """SIGKILL of the whole process tree while it works, at moments that the seed knows."""
    moments = [round(fixture.random.uniform(0, 0.6), 3) for _ in range(KILLS)]
    for number, after_s in enumerate(moments):
        fixture.send(1 / (KILLS + 1))
        if number == 0:
            fixture.send(1 / (KILLS + 1))
        run = _works(fixture)
        _pause(fixture, after_s)
        if run.lives:
            fixture.kill(run)
            fixture.fire("kill while it works", after_s=after_s)
        else:
            fixture.end(run)
    if fixture.left:
        fixture.send()
    fixture.drain()
    _settled(fixture)


def broker_killed(fixture: Fixture) -> None:
    """SIGKILL of the broker while it works; it comes back after a second."""
    fixture.send(0.6)
    run = _works(fixture)
    fixture.broker.kill()
    fixture.fire("broker killed")
    _pause(fixture, 1.0)
    fixture.broker.restart()
    fixture.end(run)
    fixture.send()
    fixture.drain()
    _settled(fixture)


def _fault(name: str, place: str, text: str, script: Script, *requires: str, needs: tuple[str, ...] = ()) -> Fault:
    return Fault(name, place, text, script, requires, extra=_BATCH, needs=needs)


FAULTS = (
    _fault("none", "none", "none", undisturbed),
    _fault("killed", "F6b", f"killed up to {KILLS} times while it runs", killed, "kill while it works"),
    _fault("broker-killed", "F3", "the broker is killed while it runs", broker_killed, "broker killed",
           needs=(BROKER,)),
)  # fmt: skip


def _service(peer: Peer) -> str:
    if peer.command is None:
        return SPARK
    command = peer.command

    def audit(pipeline: Path, folder: Path, environment: Mapping[str, str] | None) -> dict[str, Any]:
        raise NotImplementedError(f"{peer.name} has no audit")

    SERVICES[peer.name] = Service(peer.name, lambda pipeline, *_: command(pipeline), audit, sql=True)
    return peer.name


def run(peers: list[str], seeds: int, minutes: float, again: bool) -> None:
    """Every fault with every seed; what is stored already is run again only if that is asked for."""
    kept: dict[str, dict[str, Any]] = read_results(STORED)["results"] if STORED.exists() else {}
    known = frozenset() if again else frozenset(kept)
    environment = Environment((BUILD / "peers").resolve(), print)
    ends = time.monotonic() + 60 * minutes
    try:
        for seed in range(1, seeds + 1):
            for peer in (PEERS[name] for name in peers):
                for fault in FAULTS:
                    key = f"{peer.name}/{fault.name}/{seed}"
                    if key in known or time.monotonic() > ends:
                        continue
                    case = Case(KAFKA, peer.states, "keyed", fault, seed, _service(peer))
                    found = run_case(case, environment)
                    kept_fields = {k: v for k, v in found.to_json().items() if k not in _NOT_STORED}
                    ran = {name: origin()[name] for name in ("commit", "date")}
                    kept[key] = {**kept_fields, "blocked_s": _blocked_s.get(case.name), **ran}
                    lines = ",\n".join(f"{json.dumps(k)}: {json.dumps(kept[k])}" for k in sorted(kept))
                    write_file(STORED, f'{{"format": {FORMAT}, "results": {{\n{lines}\n}}}}\n')
                    say = f"{key}: {found.verdict}, {found.fired} faults, {found.lost} lost, {found.duplicated} doubled"
                    print(f"{say}, {found.seconds:.0f} s {'; '.join(found.reasons)}", flush=True)
    finally:
        environment.close()
    blocked = {k: float(v["blocked_s"]) for k, v in kept.items() if v.get("blocked_s") is not None}
    found = {k: Result.from_json(v) for k, v in kept.items()}
    PAGE.write_text(page(found, blocked, [(str(v.get("commit")), v.get("date")) for v in kept.values()]), "utf-8")


def page(results: Mapping[str, Result], blocked: Mapping[str, float], origins: Sequence[tuple[str, str | None]]) -> str:
    """What each states, what was seen, and how soon.

    Args:
        origins: commit of this project, and the day, of every run; no day: not recorded.
    """
    there = [p for p in PEERS.values() if any(k.startswith(f"{p.name}/") for k in results)]
    seeds = sorted({r.seed for r in results.values()})
    lines = [
        "# The same kills for every product",
        "",
        "This page shows what other products do under the kills of `delivered verify`; read it to compare them. In",
        "each run, 1,200 records go from one Kafka topic to another on one machine, judged from outside in the same",
        "way (`make peers`). *Held*: these runs did not contradict the guarantee that the product claims, which does",
        "not prove that it always holds. Lost and duplicated are what a read-committed reader found, whatever the",
        "product claims. Each product is configured for that guarantee as its documentation says, in",
        "`benchmarks/peer_apps`.",
        "",
        "| product | claims | fault | runs | faults | held | lost | duplicated |",
        "|---|---|---|---:|---:|---:|---:|---:|",
    ]
    for peer in there:
        for fault in FAULTS:
            found = _of(results, peer, fault.name)
            if found:
                held = sum(r.verdict == "held" for r in found)
                lines.append(
                    f"| {peer.text} | `{peer.states}` | {fault.text} | {len(found)} | {sum(r.fired for r in found)} | "
                    f"{held} of {len(found)} | {sum(r.lost for r in found)} | {sum(r.duplicated for r in found)} |"
                )
    lines += [
        "",
        "Median time until a read-committed reader saw the first record, in seconds, on two cores. Conditions were not",
        "controlled: treat these times as orders of magnitude, not as a comparison.",
        "",
        "| product | first start | after a kill | readers blocked at the end, at most |",
        "|---|---:|---:|---:|",
    ]
    for peer in there:
        first = [r.first_effect_s for r in _of(results, peer, "none") if r.first_effect_s is not None]
        back = [s for r in _of(results, peer, "killed") for s in r.recovery_s]
        held_up = [s for k, s in blocked.items() if k.startswith(f"{peer.name}/")]
        most = f"{max(held_up):.0f}" if held_up else "-"
        lines.append(f"| {peer.text} | {_median(first)} | {_median(back)} | {most} |")
    lines += ["", *_others_better(results), ""]
    missing = [p.text for p in PEERS.values() if p not in there]
    if missing:
        lines += [f"Not run yet: {'; '.join(missing)}.", ""]
    reasons = [f"- `{k}`: {'; '.join(r.reasons)}" for k, r in sorted(results.items()) if r.reasons]
    if reasons:
        lines += ["Not held, or unknown:", "", *reasons, ""]
    lines += [
        f"Versions: {', '.join(f'{k} {v}' for k, v in versions().items())};",
        f"{', '.join((*PACKAGES, *FLINK_PACKAGES))}; Kafka {KAFKA_VERSION} as the broker.",
        f"{_ran(origins)} Seeds {', '.join(map(str, seeds))}. Repeat with `make peers`, or one product with `python -m",
        "benchmarks.peers --peer quix-eo`. Results in `docs/peers.json` are kept unless you add `--again`.",
        "",
    ]
    return "\n".join(lines)


def _ran(origins: Sequence[tuple[str, str | None]]) -> str:
    known = sorted({(day, commit) for commit, day in origins if day})
    said = [f"Run {', '.join(f'on {day} at commit {commit}' for day, commit in known)}."] if known else []
    if unknown := sum(day is None for _, day in origins):
        said.append(f"Commit and date of {unknown} of {len(origins)} runs were not recorded.")
    return " ".join(said)


def _of(results: Mapping[str, Result], peer: Peer, fault: str) -> list[Result]:
    return [r for k, r in results.items() if k.startswith(f"{peer.name}/{fault}/")]


def _median(seconds: Sequence[float]) -> str:
    return f"{statistics.median(seconds):.1f}" if seconds else "-"


def _others_better(results: Mapping[str, Result]) -> list[str]:
    """Where a peer that held was faster than ours of the same guarantee."""
    found, compared = [], False
    for ours in (p for p in PEERS.values() if p.command is None):
        own = [r.first_effect_s for r in _of(results, ours, "none") if r.first_effect_s is not None]
        for peer in (p for p in PEERS.values() if p.command is not None and p.states is ours.states):
            runs = [r for k, r in results.items() if k.startswith(f"{peer.name}/")]
            first = [r.first_effect_s for r in _of(results, peer, "none") if r.first_effect_s is not None]
            compared = compared or bool(own and first)
            if own and first and runs and statistics.median(first) < statistics.median(own):
                held = "and held in every run" if all(r.verdict == "held" for r in runs) else "and did not always hold"
                times = statistics.median(own) / statistics.median(first)
                found.append(f"- {peer.text} shows its first record {times:.1f} times sooner than {ours.text}, {held}.")
    if not compared:
        return ["Times are not compared: ours was not part of the run."]
    return ["Where others are faster:", "", *found] if found else ["No other product was faster."]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peer", action="append", choices=list(PEERS), default=None)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--again", action="store_true")
    arguments = parser.parse_args()
    run(arguments.peer or list(PEERS), arguments.seeds, arguments.minutes, arguments.again)


if __name__ == "__main__":
    main()
