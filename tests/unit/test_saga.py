"""Sagas without a crash: declarations, what comes next, the command line, formats, the example of the page."""

from __future__ import annotations

import contextlib
import json
import pickle
import re
import sqlite3
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from delivered.cli.main import app
from delivered.model.errors import BadRecord, Refused, UsageError
from delivered.patterns.caller import Caller
from delivered.patterns.saga import NO_UNDO, Call, Done, Http, Log, Rejected, Saga, Status, Step, Verb, begin, ddl, run
from delivered.patterns.saga.definition import Entry, Event, next_of
from delivered.patterns.saga.log import SAGAS, check_tables

ROOT = Path(__file__).parents[2]


def nothing(call: Call) -> None:
    """A step that does nothing."""


def step(name: str, **given: Any) -> Step:
    return Step(name, **{"do": nothing, "undo": nothing, "backoff_s": 0.0, **given})


KEYED, ASKED, PLAIN = step("keyed", takes_key=True), step("asked", ask=nothing), step("plain")
SAGA = Saga("s", [KEYED, ASKED, PLAIN, step("last", undo=NO_UNDO)])


def test_a_do_without_undo_is_refused_when_declared() -> None:
    with pytest.raises(Refused, match=r"SAGA_UNDO_MISSING.*'pay'.*NO_UNDO"):
        Saga("s", [Step("pay", nothing)])
    Saga("s", [Step("pay", nothing, undo=NO_UNDO)])


@pytest.mark.parametrize(
    "name, steps",
    [("s", []), ("a b", [KEYED]), ("s", [KEYED, KEYED]), ("s", [step("a/b")]), ("s", [step("a", attempts_max=0)]),
     ("s", [step("a", timeout_s=0)]), ("s", [step("a", timeout_s=float("inf"))]),
     ("", [KEYED]), ("s", [step(str(n)) for n in range(65)])],
)  # fmt: skip
def test_wrong_declarations_are_refused(name: str, steps: list[Step]) -> None:
    with pytest.raises(UsageError, match="SAGA_DECLARATION"):
        Saga(name, steps)


def test_a_worker_keeps_a_saga_for_as_long_as_a_call_by_http_may_take() -> None:
    slow = Http("http://service.invalid/", timeout_s=100)
    for given in ({"do": slow}, {"undo": slow}):
        assert Saga("s", [KEYED, step("slow", timeout_s=1, **given)]).lease_s > 100


def test_keys_differ_and_are_printable() -> None:
    ids = ("a", "a/b", "ä", "a%2Fb")
    keys = {SAGA.key(i, s) for i in ids for s in SAGA.steps}
    assert len(keys) == 4 * len(ids)
    assert all(re.fullmatch(r"[!-~]+", k) for k in keys)


def log_of(*words: str) -> list[Entry]:
    """ "plain.do.started" as entries."""
    return [Entry(s, Verb(v), Event(e)) for s, v, e in (w.split(".") for w in words)]


DONE = ["keyed.do.started", "keyed.do.done"]
ASKED_DONE = [*DONE, "asked.do.started", "asked.do.done"]
PLAIN_DONE = [*ASKED_DONE, "plain.do.started", "plain.do.done"]


@pytest.mark.parametrize(
    "entries, then",
    [
        ([], "running keyed.do"),
        (["keyed.do.started"], "running keyed.do"),  # killed: again, with the key
        (["keyed.do.started", "keyed.do.failed"], "running keyed.do"),
        (["keyed.do.started"] * 5, "compensating keyed.undo"),  # perhaps done
        (["keyed.do.started", "keyed.do.rejected"], "compensated"),
        # the first attempt may have been done, whatever the second was told
        (["keyed.do.started", "keyed.do.started", "keyed.do.rejected"], "compensating keyed.undo"),
        ([*DONE, "asked.do.started"], "running asked.ask"),
        ([*DONE, "asked.do.started", "asked.ask.started"], "running asked.ask"),
        ([*DONE, "asked.do.started", "asked.ask.started", "asked.ask.not_done"], "running asked.do"),
        ([*DONE, "asked.do.started", "asked.ask.started", "asked.ask.done"], "running plain.do"),
        ([*DONE, "asked.do.started", *["asked.ask.started"] * 5], "compensating asked.undo"),
        ([*DONE, *["asked.do.started", "asked.ask.started", "asked.ask.not_done"] * 5], "compensating keyed.undo"),
        ([*ASKED_DONE, "plain.do.started"], "compensating plain.undo"),  # never again
        ([*ASKED_DONE, "plain.do.started", "plain.do.rejected"], "compensating asked.undo"),
        ([*PLAIN_DONE, "last.do.started"], "compensating plain.undo"),  # perhaps done, may stay
        ([*PLAIN_DONE, "last.do.started", "last.do.done"], "complete"),
        ([*DONE, "asked.do.started", "asked.do.rejected", "keyed.undo.started"], "compensating keyed.undo"),
        ([*DONE, "asked.do.started", "asked.do.rejected", *["keyed.undo.started"] * 5], "stuck"),
        ([*DONE, "asked.do.started", "asked.do.rejected", *["keyed.undo.started"] * 5, "keyed.undo.retry"],
         "compensating keyed.undo"),
        ([*DONE, "asked.do.started", "asked.do.rejected", "keyed.undo.started", "keyed.undo.skipped"], "compensated"),
        # never forward again, though the declaration now allows more attempts
        (["keyed.do.started", "keyed.undo.started"], "compensating keyed.undo"),
    ],
)  # fmt: skip
def test_what_comes_next(entries: list[str], then: str) -> None:
    status, next_ = next_of(SAGA, log_of(*entries))
    assert then == (f"{status} {next_.step.name}.{next_.verb}" if next_ is not None else status)


@pytest.fixture
def log(tmp_path: Path) -> Iterator[Log]:
    made = Log(str(tmp_path / "sagas.db"))
    made.create()
    made.create()  # again: nothing happens
    yield made


def begun(log: Log, saga: Saga, id_: str = "1", data: Any = None) -> None:
    with contextlib.closing(sqlite3.connect(str(log.where))) as connection:
        assert begin(connection, saga, id=id_, data=data)
        connection.commit()


def test_results_and_keys_reach_later_steps_and_compensations(log: Log) -> None:
    seen: list[tuple[str, str, str, Any, dict[str, Any], int]] = []

    def tell(call: Call) -> Any:
        seen.append((call.step, call.verb, call.key, call.data, dict(call.results), call.attempt))
        if call.step == "b" and call.verb == "do" and call.attempt == 1:
            raise OSError("no route")
        if call.step == "c":
            raise Rejected("no")
        return {"from": call.step}

    made = Saga("s", [step(n, do=tell, undo=tell, takes_key=True) for n in "abc"])
    begun(log, made, data=[1])
    assert run(log, made) == {Status.COMPENSATED: 1}
    a, ab = {"a": {"from": "a"}}, {"a": {"from": "a"}, "b": {"from": "b"}}
    assert seen == [
        ("a", "do", "s/1/a", [1], {}, 1), ("b", "do", "s/1/b", [1], a, 1), ("b", "do", "s/1/b", [1], a, 2),
        ("c", "do", "s/1/c", [1], ab, 1), ("b", "undo", "s/1/b", [1], ab, 1), ("a", "undo", "s/1/a", [1], ab, 1),
    ]  # fmt: skip


def test_a_result_that_is_no_json_turns_the_saga_back(log: Log) -> None:
    undone: list[str] = []
    made = Saga("s", [step("a", do=lambda call: object(), undo=lambda call: undone.append(call.step), attempts_max=2,
                           takes_key=True)])  # fmt: skip
    begun(log, made)
    assert run(log, made) == {Status.COMPENSATED: 1}
    assert undone == ["a"]


def test_the_answer_of_an_ask_is_the_result(log: Log) -> None:
    def fails(call: Call) -> None:
        raise TimeoutError

    seen: list[Any] = []
    made = Saga("s", [step("a", do=fails, ask=lambda call: Done(7)), step("b", do=lambda c: seen.append(c.results))])
    begun(log, made)
    assert run(log, made) == {Status.COMPLETE: 1}
    assert seen == [{"a": 7}]


def test_a_worker_takes_only_sagas_with_its_steps(log: Log) -> None:
    begun(log, SAGA)
    assert run(log, Saga("s", [step("other")])) == {}
    assert run(log, SAGA, threads=3) == {Status.COMPLETE: 1}


@pytest.mark.skipif(sys.version_info < (3, 12), reason="sqlite3.connect has no autocommit")
@pytest.mark.parametrize("autocommit", [True, False])
def test_a_log_on_sqlite_connections_with_autocommit(log: Log, autocommit: bool) -> None:
    path = log.where
    own = Log(lambda: sqlite3.connect(path, autocommit=autocommit))  # type: ignore[call-overload]
    begun(log, SAGA)
    assert run(own, SAGA) == {Status.COMPLETE: 1}


def test_sagas_that_no_worker_takes_end_the_wait_for_them(log: Log) -> None:
    """Begun before the steps changed, by an attempt of a batch that was killed."""
    begun(log, SAGA)
    other = Saga("s", [KEYED])
    with contextlib.closing(sqlite3.connect(str(log.where))) as connection:
        connection.execute(f"UPDATE {SAGAS} SET due_ms = due_ms - 30000")
        connection.commit()
        stop = threading.Event()
        threading.Timer(0.7, stop.set).start()
        assert run(log, other, ids=["1"], stop=stop) == {}, "an old worker may be running"
        connection.execute(f"UPDATE {SAGAS} SET due_ms = due_ms - 60000")
        connection.commit()
    with pytest.raises(Refused, match=r'SAGA_STEPS.*"plain".*now has \["keyed"\]'):
        run(log, other, ids=["1"], stop=threading.Event())
    assert run(log, SAGA, ids=["1"]) == {Status.COMPLETE: 1}
    assert run(log, other, ids=["1"]) == {Status.COMPLETE: 1}


def test_a_file_that_takes_the_logs_place_is_worked_on(log: Log) -> None:
    """As a restore does. A worker would go on in the old file, which nobody else sees; in WAL mode, SQLite lets it."""
    file = Path(str(log.where))
    with contextlib.closing(sqlite3.connect(file)) as connection:
        connection.execute("PRAGMA journal_mode=WAL")
    calls: list[int] = []

    def replace(call: Call) -> None:
        calls.append(call.attempt)
        if len(calls) == 1:
            copy = file.with_name("copy.db")
            with contextlib.closing(sqlite3.connect(file)) as here, contextlib.closing(sqlite3.connect(copy)) as there:
                here.backup(there)
                assert begin(there, made, id="2")
                there.execute(f"UPDATE {SAGAS} SET due_ms = 0")  # no lease to wait for
                there.commit()
            for name in ("sagas.db-wal", "sagas.db-shm"):
                file.with_name(name).unlink(missing_ok=True)
            copy.replace(file)

    made = Saga("s", [step("a", do=replace, takes_key=True)])
    begun(log, made)
    assert run(log, made) == {Status.COMPLETE: 2}
    assert len(calls) == 3


@pytest.mark.parametrize("given", [{"id": ""}, {"id": "x" * 129}, {"id": 7}, {"id": "a\0"}, {"data": {1, 2}},
                                   {"data": float("nan")}, {"data": "x" * (1 << 20)}])  # fmt: skip
def test_bad_input_is_refused_before_the_database_is_asked(given: dict[str, Any]) -> None:
    with pytest.raises(BadRecord, match=r"SAGA_(ID|DATA)"):
        begin(None, SAGA, **{"id": "1", **given})


def test_a_newer_or_missing_log_is_refused(log: Log, tmp_path: Path) -> None:
    with contextlib.closing(sqlite3.connect(str(log.where))) as connection:
        connection.execute("UPDATE delivered_saga_format SET version = 2")
        connection.commit()
        with pytest.raises(Refused, match="FORMAT_NEWER"):
            begin(connection, SAGA, id="1")
    with pytest.raises(Refused, match="FORMAT_NEWER"):
        run(log, SAGA)
    with pytest.raises(Refused, match=r"SAGA_TABLES.*delivered sagas create"):
        run(Log(str(tmp_path / "none.db")), SAGA)
    assert not (tmp_path / "none.db").exists()


def test_every_dialect_has_its_tables() -> None:
    assert all(len(ddl(d)) == 4 for d in ("postgres", "mysql", "sqlite"))
    with contextlib.closing(sqlite3.connect(":memory:")) as connection:
        for statement in ddl("sqlite"):
            connection.execute(statement)
        check_tables(Caller(connection, what="test"))


def test_a_log_is_picklable() -> None:
    log = Log("postgresql://db/shop", "env:SECRET")
    assert pickle.loads(pickle.dumps(log)) == log


def call(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["sagas", *arguments])
    return result.exit_code, result.stdout or result.stderr


def test_a_person_resolves_what_is_stuck(log: Log, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "stuck_saga.py").write_text(
        "from pathlib import Path\n"
        "from delivered.patterns.saga import Rejected, Saga, Step\n"
        "def no(call):\n    raise Rejected('no')\n"
        "def undo(call):\n    if not Path('mended').exists():\n        raise OSError('service is gone')\n"
        "saga = Saga('s', [Step('a', lambda c: 1, undo=undo, backoff_s=0.0, attempts_max=2), Step('b', no, undo=no)])\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    from delivered.patterns.saga.definition import load

    for id_ in "123":
        begun(log, load("stuck_saga:saga"), id_)
    where = ("--log", str(log.where))
    run_it = ("run", "stuck_saga:saga", *where, "--until-rest", "--output", "json")
    assert call(*run_it) == (0, '{\n  "stuck": 3\n}\n')
    code, out = call("list", *where)
    assert (code, out.count("stuck "), out.count("service is gone")) == (0, 3, 3)
    (tmp_path / "mended").touch()
    assert call("retry", "1", *where)[0] == call("done", "2", *where)[0] == call("skip", "3", *where)[0] == 0
    assert "SAGA_NOT_STUCK" in call("retry", "1", *where)[1]
    assert call("retry", "4", *where)[0] == 2
    assert call(*run_it)[1] == '{\n  "compensated": 3\n}\n'
    assert call("list", *where) == (0, "no sagas are stuck or under way\n")
    rows = json.loads(call("list", "--all", "--output", "json", *where)[1])
    assert [(r["id"], r["status"]) for r in rows] == [("1", "compensated"), ("2", "compensated"), ("3", "compensated")]
    assert "SAGA_NOT_FOUND" in call("run", "stuck_saga:undo", *where)[1]
