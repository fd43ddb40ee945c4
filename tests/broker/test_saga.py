"""Sagas in real databases against a real HTTP service: workers killed at every call, paused, two at once."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from tests.support.sweeps import sweep

from delivered.model.errors import UsageError
from delivered.patterns import saga
from delivered.patterns.saga.definition import Event, Status
from delivered.patterns.saga.log import ENTRIES, FORMATS, SAGAS
from delivered_lab.verify import applications, sagas
from delivered_lab.verify.ends import MOMENTS, Point, killed_everywhere
from delivered_lab.verify.sagas import Shop, checkout, disagreements

ROOT = Path(__file__).parents[2]
DIALECTS = ["sqlite", "postgres", "mysql"]


class World:
    """A saga log, and a shop."""

    def __init__(self, dialect: str, url: str) -> None:
        self.dialect, self.url = dialect, url
        self.shop = Shop()
        self.log = sagas.connect(dialect, url)
        self.saga = checkout(self.shop.url)
        self.log.create()

    def begin(self, **sagas: Any) -> None:
        with contextlib.closing(applications.connect(self.dialect, self.url)) as connection:
            for id_, data in sagas.items():
                assert saga.begin(connection, self.saga, id=id_, data=data)
            connection.commit()

    def start(self, variant: str = "", crash: str = "", folder: Path = ROOT, **spec: Any) -> subprocess.Popen[str]:
        spec = {
            "dialect": self.dialect,
            "log": self.url,
            "shop": self.shop.url,
            "variant": variant and f"tests.verify.broken.broken_sagas:{variant}",
            **spec,
        }
        path = os.pathsep.join([str(ROOT), str(ROOT / "src")])
        environment = {**os.environ, "PYTHONPATH": path, "DELIVERED_CRASH": crash, "DELIVERED_CRASH_DIR": str(folder)}
        return subprocess.Popen(
            [sys.executable, "-m", "delivered_lab.verify.sagas", json.dumps(spec)],
            cwd=ROOT, env=environment, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip

    def run_killed(self, points: list[Point], folder: Path, variant: str = "") -> int:
        """Start workers until one ends by itself; how many were killed."""
        folder.mkdir()
        self.shop.kills |= {p for p in points if p[2] in ("lost", "in")}
        crash = ",".join(f"saga.call:{m}@id={i}@call={c}!kill" for i, c, m in points if m in ("before", "after"))
        worker = self.start(variant, crash, folder, kills=len(points) + 1)
        out, errors = worker.communicate(timeout=400)
        assert worker.returncode == 0, errors
        return int(json.loads(out.splitlines()[-1])["killed"])

    def statuses(self) -> dict[str, str]:
        with contextlib.closing(self.log.open()) as log:
            return {r.id: r.status.value for r in log.rows(list(Status), 10_000)}

    def events(self, id_: str) -> list[tuple[str, str, str]]:
        with contextlib.closing(applications.connect(self.dialect, self.url)) as connection:
            rows = applications.execute(
                connection, f"SELECT step, verb, event FROM delivered_saga_entry WHERE id = '{id_}' ORDER BY n"
            )
            return [(str(a), str(b), str(c)) for a, b, c in rows]


@pytest.fixture
def world(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[World]:
    """Of the parameter `dialect`; a log without sagas."""
    dialect = request.getfixturevalue("dialect")
    if dialect == "sqlite":
        made = World(dialect, str(tmp_path / "sagas.db"))
    else:
        server = request.getfixturevalue(dialect)
        made = World(dialect, server.url if dialect == "postgres" else server.broker.bootstrap)
        for table in ("delivered_saga", "delivered_saga_entry"):
            server.execute(f"DELETE FROM {table}")
    yield made
    made.shop.close()


@pytest.mark.parametrize("dialect", DIALECTS)
def test_workers_may_create_the_log_together(dialect: str, world: World) -> None:
    """IF NOT EXISTS does not see a table that another transaction is creating, and fails over it."""
    count = 4
    with ThreadPoolExecutor(count) as pool:
        for _ in range(5):
            with contextlib.closing(applications.connect(dialect, world.url)) as connection:
                for table in (SAGAS, ENTRIES, FORMATS):
                    connection.cursor().execute(f"DROP TABLE {table}")
                connection.commit()
            together = threading.Barrier(count)

            def create(_: int, together: threading.Barrier = together) -> None:
                together.wait()
                world.log.create()

            assert [*pool.map(create, range(count))] == [None] * count
            world.log.open().close()


@pytest.mark.matrix
@pytest.mark.parametrize("dialect", DIALECTS)
def test_killed_at_every_call_every_saga_comes_to_rest_and_effects_add_up(
    dialect: str, world: World, tmp_path: Path
) -> None:
    sagas, points = killed_everywhere(tuple(MOMENTS))
    world.begin(**sagas)
    killed = world.run_killed(points, tmp_path / "crashes")
    statuses = world.statuses()
    assert killed == len(points), "every point was reached"
    assert not list(disagreements(world.shop, statuses))
    ended = {i: s for i, s in statuses.items() if i.startswith(("good", "asked", "quiet", "bad", "again", "doubt"))}
    assert set(ended) == set(sagas)
    # Turned back although nothing was rejected: only where a step that must not be repeated may have been done.
    turned = {
        i for i, s in statuses.items() if s == "compensated" and "fail" not in sagas[i] and "denies" not in sagas[i]
    }
    assert turned == {i for i, call, _ in points if call == "mail.do" and i.startswith("good")}
    mails = Counter(i for i, call, _ in world.shop.calls if call == "mail.do")
    assert max(mails.values()) == 1, "a step that takes no key and cannot be asked is called once"


@pytest.mark.matrix
@pytest.mark.parametrize("dialect", sweep(DIALECTS, lambda dialect: dialect == "postgres"))
def test_killed_in_each_call(dialect: str, world: World, tmp_path: Path) -> None:
    """The smaller set of the sweep above."""
    sagas, points = killed_everywhere(("in",))
    world.begin(**sagas)
    assert world.run_killed(points, tmp_path / "crashes") == len(points)
    assert not list(disagreements(world.shop, world.statuses()))


MUTANTS: dict[str, list[tuple[str, dict[str, Any], str, str]]] = {
    "log_after_the_step": [("good", {}, "mail.do", "in")],
    "key_per_try": [("good", {}, "pay.do", "in")],
    "undo_in_order": [("bad", {"fail": "confirm"}, "pay.undo", "in")],
    "undo_once": [("bad", {"fail": "confirm"}, "pay.undo", "lost")],
    "repeats_any_step": [("good", {}, "mail.do", "in")],
    "rejected_is_not_done": [("doubt", {"flaky": ["pay"], "denies": "pay"}, "reserve.do", "in")],
}


@pytest.mark.parametrize("variant", sweep(MUTANTS, lambda v: v == "log_after_the_step"))
@pytest.mark.parametrize("dialect", ["sqlite"])
def test_the_checker_sees_broken_variants(dialect: str, variant: str, world: World, tmp_path: Path) -> None:
    world.begin(**{name: data for name, data, _, _ in MUTANTS[variant]})
    points = [(name, call, moment) for name, _, call, moment in MUTANTS[variant]]
    assert world.run_killed(points, tmp_path / "crashes", variant) == len(points)
    assert list(disagreements(world.shop, world.statuses()))


def until(fact: Any) -> None:
    deadline = time.monotonic() + 60
    while not fact():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.mark.parametrize(
    "dialect, variant",
    sweep([*((d, "") for d in DIALECTS), ("sqlite", "no_fence")], lambda dialect, variant: dialect != "postgres"),
)
def test_a_paused_worker_is_fenced(dialect: str, variant: str, world: World) -> None:
    """F7: paused after the effect of pay, until another worker turned back and finished."""
    world.shop.pauses.add(("a", "pay.do"))
    world.begin(a={"fail": "ship"})
    first = world.start(variant)
    try:
        until(lambda: world.shop.paused)
        (pid,) = world.shop.paused
        _, errors = world.start(variant).communicate(timeout=60)
        assert world.statuses() == {"a": "compensated"}, errors
        before = world.events("a")
    finally:
        first.send_signal(signal.SIGCONT)
    _, errors = first.communicate(timeout=60)
    assert first.returncode == 0, errors
    ours = [c for i, c, p in world.shop.calls if p == pid]
    if variant:
        assert world.events("a") != before, "the checker sees a worker that is not fenced"
    else:
        assert world.events("a") == before
        assert "SAGA_FENCED" in errors
        assert ours == ["reserve.do", "pay.do"], "it called nothing more"
        assert world.statuses() == {"a": "compensated"}
        assert not list(disagreements(world.shop, world.statuses()))


# test_a_paused_worker_is_fenced takes the other two.
@pytest.mark.parametrize("dialect", sweep(DIALECTS, lambda dialect: dialect == "postgres"))
def test_workers_at_once_never_run_the_same_saga(dialect: str, world: World) -> None:
    n = 30
    world.begin(**{f"s{i}": {"fail": "confirm"} if i % 3 == 0 else {} for i in range(n)})
    workers = [world.start(margin_s=60) for _ in range(3)]
    told: Counter[str] = Counter()
    for worker in workers:
        out, errors = worker.communicate(timeout=120)
        assert worker.returncode == 0, errors
        told.update(json.loads(out)["rested"])
    assert told == {"complete": 20, "compensated": 10}
    assert not list(disagreements(world.shop, world.statuses()))
    by = {i: {p for j, _, p in world.shop.calls if j == i} for i in {c[0] for c in world.shop.calls}}
    assert all(len(pids) == 1 for pids in by.values())
    assert len(set.union(*by.values())) > 1, "more than one worker had sagas"


@pytest.mark.parametrize("dialect", sweep(DIALECTS[1:], lambda dialect: dialect == "postgres"))
def test_sagas_go_on_after_their_database_was_killed(
    dialect: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    """Killed after an effect, before its outcome is logged; the same worker connects again."""
    server = request.getfixturevalue(f"new_{dialect}")()
    world = World(dialect, server.url if dialect == "postgres" else server.broker.bootstrap)

    def outage() -> None:
        server.broker.kill()
        threading.Thread(target=server.broker.restart).start()

    calls = [("paid", "pay.do"), ("mailed", "mail.do"), ("undone", "ship.undo")]
    world.shop.faults = dict.fromkeys(calls, outage)
    world.begin(paid={}, mailed={}, undone={"fail": "confirm"}, quiet={})
    worker = world.start()
    out, errors = worker.communicate(timeout=240)
    world.shop.close()
    assert worker.returncode == 0, errors
    assert not world.shop.faults, "every outage happened"
    assert sum(json.loads(out)["rested"].values()) == 4
    statuses = world.statuses()
    assert statuses == {"paid": "complete", "mailed": "compensated", "undone": "compensated", "quiet": "complete"}
    assert not list(disagreements(world.shop, statuses))


@pytest.mark.parametrize("dialect", sweep(DIALECTS, lambda dialect: dialect == "sqlite"))
def test_a_stuck_saga_waits_for_a_person(dialect: str, world: World) -> None:
    data = {"fail": "confirm", "undo_fails": "ship"}
    world.begin(retried=data, skipped=data, by_hand=data)
    world.start().communicate(timeout=60)
    assert set(world.statuses().values()) == {"stuck"}
    with contextlib.closing(world.log.open()) as log:
        (row, *_) = log.rows([Status.STUCK], 10)
        assert (row.step, "answered 500" in row.error) == ("ship", True)
        log.resolve("retried", Event.RETRY)
        log.resolve("skipped", Event.SKIPPED)
        log.resolve("by_hand", Event.DONE)
    world.start().communicate(timeout=60)
    assert world.statuses() == {"retried": "stuck", "skipped": "compensated", "by_hand": "compensated"}
    undone = {(i, c) for i, c in world.shop.effects if c.endswith(".undo")}
    rest = {"mail.undo", "pay.undo", "reserve.undo"}
    assert undone == {("retried", "mail.undo"), *((i, c) for i in ("skipped", "by_hand") for c in rest)}
    with contextlib.closing(world.log.open()) as log:
        assert (log.clean(3600), log.clean(-1), log.clean(-1)) == (0, 2, 0), "those at rest; a stuck one stays"
    assert world.statuses() == {"retried": "stuck"}
    assert world.events("skipped") == []
    world.begin(skipped={})
    for id_ in ("skipped", "by_hand"):
        with contextlib.closing(world.log.open()) as log, pytest.raises(UsageError, match=r"SAGA_(NOT_STUCK|UNKNOWN)"):
            log.resolve(id_, Event.RETRY)


@pytest.mark.parametrize("dialect", DIALECTS)
def test_a_saga_begins_with_its_business_row(dialect: str, world: World) -> None:
    with contextlib.closing(applications.connect(dialect, world.url)) as connection:
        assert saga.begin(connection, world.saga, id="a", data={"b": 1, "c": "é"})
        connection.rollback()
        assert saga.begin(connection, world.saga, id="a", data={"b": 1, "c": "é"})
        connection.commit()
        assert not saga.begin(connection, world.saga, id="a", data={"c": "é", "b": 1})
        for other in ({"b": 2}, {"b": True, "c": "é"}):
            with pytest.raises(saga.DuplicateSaga, match="SAGA_ID_REUSED"):
                saga.begin(connection, world.saga, id="a", data=other)
        assert saga.begin(connection, world.saga, id="a ", data=None)
        assert saga.begin(connection, world.saga, id="A", data="text")
        connection.commit()
    assert set(world.statuses()) == {"a", "a ", "A"}
