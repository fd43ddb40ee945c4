"""When audits of a running pipeline start, what share of the time they take, and what ends them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import delivered
from delivered.checkpoint import history
from delivered.model.errors import UsageError
from delivered.operate.continuous import Audited, AuditProcess, ContinuousAudit, Follower, Load, Schedule
from delivered.pipeline.definition import Cadence, Definition

IDLE = Load(idle=True, behind=False)
BUSY = Load(idle=False, behind=False)
BEHIND = Load(idle=True, behind=True)


class Clock:
    """Stands still until somebody works."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.mark.parametrize(
    ("every", "share", "expected"),
    [
        ("15 min", None, Cadence(900.0, 0.1)),
        ("1 hour 30 minutes", "25 %", Cadence(5400.0, 0.25)),
        ("2 s", 0.5, Cadence(2.0, 0.5)),
        ("1 d", "100%", Cadence(86_400.0, 1.0)),
    ],
)
def test_a_cadence_is_read(every: str, share: str | float | None, expected: Cadence) -> None:
    assert Cadence.parse(every, share) == expected


@pytest.mark.parametrize("every", ["often", "0 min", "15", "-1 min", ""])
def test_a_wrong_interval(every: str) -> None:
    with pytest.raises(UsageError, match=r"audit.every is '.*'; it must be a duration above 0"):
        Cadence.parse(every)


@pytest.mark.parametrize("share", ["0 %", "101 %", "some", 0, 2.0, "-5 %", "nan"])
def test_a_wrong_share(share: str | float) -> None:
    with pytest.raises(UsageError, match=r"audit.share is .*; it must be a share above 0"):
        Cadence.parse("15 min", share)


def test_the_pipeline_declares_it(tmp_path: Path) -> None:
    def declared(**audit: object) -> Cadence | None:
        return delivered.Pipeline(
            name="p", guarantee="exactly_once", checkpoint=tmp_path / "c", source=delivered.log(str(tmp_path)),
            sinks=[delivered.sqlite(str(tmp_path / "o"), "o")], audit=audit,
        ).audit_every  # fmt: skip

    assert declared() is declared(id="value") is None
    assert declared(id="value", every="15 min") == Cadence(900.0)
    with pytest.raises(UsageError, match="AUDIT_SHARE"):
        declared(share="10 %")
    with pytest.raises(UsageError, match=r"audit has no \['evry'\]; known: id, key, own, every, share"):
        declared(evry="15 min")


def test_a_sink_has_no_interval_of_its_own(tmp_path: Path) -> None:
    sink = delivered.endpoint("sqlite", path=str(tmp_path / "o"), table="o", audit={"every": "15 min"})
    with pytest.raises(UsageError, match="known: id, key, own"):
        delivered.Pipeline(
            name="p",
            guarantee="exactly_once",
            checkpoint=tmp_path / "c",
            source=delivered.log(str(tmp_path)),
            sinks=[sink],
        )


def test_the_first_audit_is_due_when_the_last_seal_is_an_interval_old() -> None:
    cadence = Cadence(900.0)
    assert Schedule(cadence, 50.0, None).due_s == 50.0
    assert Schedule(cadence, 50.0, 600.0).due_s == 350.0
    assert Schedule(cadence, 50.0, 5000.0).due_s == 50.0
    assert Schedule(cadence, 50.0, -9999.0).due_s == 950.0, "a seal of a clock that is ahead"


def test_no_audit_starts_while_the_query_is_behind() -> None:
    schedule = Schedule(Cadence(900.0), 0.0)
    assert not schedule.may_start(1e9, BEHIND)
    assert not schedule.may_start(0.0, BUSY), "it waits a little for a moment between two batches"
    assert schedule.may_start(0.0, IDLE)
    assert schedule.may_start(11.0, BUSY), "whose batches follow each other without a gap, and which is not behind"
    assert not schedule.may_start(1e9, Load(idle=False)), "a source that does not count its offsets"
    assert schedule.may_start(0.0, Load(idle=True))


@given(
    every_s=st.floats(0.1, 1e5),
    share=st.floats(0.01, 1.0),
    takes=st.lists(st.floats(0.0, 1e5), min_size=1, max_size=30),
    late=st.floats(0.0, 100.0),
)
def test_audits_never_take_more_than_their_share(every_s: float, share: float, takes: list[float], late: float) -> None:
    schedule, now, spent, starts = Schedule(Cadence(every_s, share), 0.0), 0.0, 0.0, list[float]()
    for took in takes:
        now = schedule.due_s + late
        assert schedule.may_start(now, IDLE)
        starts.append(now)
        schedule.ended(now, now + took)
        spent += took
        assert spent <= share * schedule.due_s * (1 + 1e-9) + 1e-6
    assert all(b - a >= every_s * (1 - 1e-9) - 1e-6 for a, b in pairwise(starts))


def test_an_audit_that_fails_ends_nothing_and_is_tried_at_the_next_interval() -> None:
    clock, ran = Clock(), list[float]()

    def audit() -> None:
        ran.append(clock.now)
        clock.now += 30.0
        raise RuntimeError("the broker is away")

    audits = ContinuousAudit(Schedule(Cadence(900.0), clock.now), audit, lambda: IDLE, clock=clock)
    assert (audits.step(), audits.step()) == (True, False)
    clock.now = 1899.0
    assert not audits.step()
    clock.now = 1900.0
    assert audits.step() and ran == [1000.0, 1900.0]


def test_a_load_that_cannot_be_asked_ends_nothing() -> None:
    def load() -> Load:
        raise RuntimeError("the query has ended")

    audits = ContinuousAudit(Schedule(Cadence(900.0), 0.0), lambda: None, load)
    assert audits.step()


def test_a_stop_cuts_a_running_audit_off() -> None:
    running, cancelled = threading.Event(), threading.Event()

    def audit() -> None:
        running.set()
        cancelled.wait()

    audits = ContinuousAudit(Schedule(Cadence(900.0), 0.0), audit, lambda: IDLE, cancelled.set).start()
    assert running.wait(60)
    assert audits.stop(60) and audits.stopping
    assert audits.stop(), "again"


def test_a_stop_before_the_first_audit() -> None:
    with ContinuousAudit(Schedule(Cadence(900.0), 1e12), lambda: None) as audits:
        pass
    assert audits.stop(0)


YAML = """
pipeline: {name}
guarantee: exactly_once
checkpoint: {folder}/{name}
source: {{format: log, path: {folder}/in}}
sinks: [{{format: sqlite, path: {folder}/out.db, table: {name}}}]
"""


def follower(folder: Path, every: Cadence | None = None) -> tuple[Follower, Clock, list[str], list[str]]:
    clock, audited, said = Clock(), list[str](), list[str]()

    def audit(path: Path) -> Audited:
        audited.append(path.stem)
        clock.now += 1.0
        if path.stem == "c":
            return Audited(error="no Java")
        return Audited(({"pipeline": path.stem, "sink": "s", "verdict": "held", "seconds": 1.0},))

    def waiting(pipeline: Definition) -> Sequence[str]:
        return [] if pipeline.name == "quiet" else pipeline.sink_names

    return Follower([folder], audit, said.append, every, waiting, clock), clock, audited, said


def write(folder: Path, name: str, more: str = "") -> None:
    text = YAML.format(name=name, folder=folder)
    kept = [line for line in text.splitlines() if line.split(":")[0] != more.split(":")[0]]
    (folder / f"{name}.yaml").write_text("\n".join([*kept, more]))


def test_each_file_is_audited_at_its_own_interval(tmp_path: Path) -> None:
    write(tmp_path, "a", "audit: {every: 15 min}")
    write(tmp_path, "b", "audit: {every: 1 h, share: 100 %}")
    write(tmp_path, "d")
    one, clock, audited, said = follower(tmp_path)
    assert (one.step(), one.step()) == (2, 0)
    assert said.count("a s: held, in 1.0 s") == 1 and sum("not followed" in line for line in said) == 1
    clock.now = 1000.0 + 900.0
    assert one.step() == 1
    clock.now = 1000.0 + 3602.0
    assert one.step() == 2 and audited == ["a", "b", "a", "a", "b"]


def test_a_pipeline_that_delivered_nothing_new_is_not_audited(tmp_path: Path) -> None:
    write(tmp_path, "quiet")
    one, clock, audited, said = follower(tmp_path, Cadence(60.0))
    assert one.step() == 0
    clock.now += 61.0
    assert (one.step(), audited, said) == (0, [], [])


def test_files_that_come_change_break_and_go(tmp_path: Path) -> None:
    one, clock, audited, said = follower(tmp_path)
    assert one.step() == 0 and "NO_PIPELINES" in said[0]
    write(tmp_path, "a", "audit: {every: 15 min}")
    assert one.step() == 1
    write(tmp_path, "a", "audit: {every: soon}")
    assert (one.step(), one.step()) == (0, 0)
    assert sum("it must be a duration" in line for line in said) == 1, "said once"
    write(tmp_path, "a", "audit: {every: 1 min}")
    clock.now += 120
    assert one.step() == 1
    (tmp_path / "a.yaml").unlink()
    clock.now += 1e6
    assert one.step() == 0 and audited == ["a", "a"]


def test_an_audit_that_could_not_run_is_kept_for_status_and_ends_no_other(tmp_path: Path) -> None:
    write(tmp_path, "c")
    write(tmp_path, "e")
    (tmp_path / "c").mkdir()
    one, _, audited, _ = follower(tmp_path, Cadence(60.0))
    assert one.step() == 2 and audited == ["c", "e"]
    (line,) = history.audits(str(tmp_path / "c"))
    assert (line["verdict"], line["error"]) == ("unknown", "no Java")


def test_an_audit_of_several_sinks_that_could_not_run_is_kept_of_each(tmp_path: Path) -> None:
    write(tmp_path, "c", "sinks: [{format: sqlite, path: a.db, table: a}, {format: sqlite, path: b.db, table: b}]")
    (tmp_path / "c").mkdir()
    one, *_ = follower(tmp_path, Cadence(60.0))
    assert one.step() == 1
    assert {sink: line["error"] for sink, line in history.last_audits(str(tmp_path / "c")).items()} == {
        "a": "no Java",
        "b": "no Java",
    }
    history.add_audit(str(tmp_path / "c"), {"sink": "a", "verdict": "held"})
    assert "error" not in history.last_audits(str(tmp_path / "c"))["a"], "the next one that runs replaces it"


def test_a_process_says_why_it_could_not_audit(tmp_path: Path) -> None:
    write(tmp_path, "e", "trigger: soon")
    found = AuditProcess()(tmp_path / "e.yaml")
    assert found.reports == () and found.error.startswith("[DELIVERED_") and "soon" in found.error
    assert " Next: " in found.error and '"code"' not in found.error


def test_a_stop_between_two_files(tmp_path: Path) -> None:
    write(tmp_path, "a")
    write(tmp_path, "b")
    one, _, audited, _ = follower(tmp_path, Cadence(60.0))
    stopped: Callable[[], bool] = lambda: bool(audited)  # noqa: E731
    assert one.step(stopped) == 1 and audited == ["a"]
