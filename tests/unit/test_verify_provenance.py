"""What a verdict rests on: which code it was found of, and the verdicts before it."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import docs.verified as published
import pytest

from delivered_lab.verify import matrix, provenance
from delivered_lab.verify.case import AHEAD, Case, Result
from delivered_lab.verify.matrix import Choice, Store, read_cases, write_file
from delivered_lab.verify.services import ENGINE, SPARK
from delivered_lab.verify.systems import KAFKA, SQLITE

CASE = "sqlite/exactly_once/keyed/killed-between"


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A copy of the package whose code may change."""
    copy = tmp_path / "package"
    shutil.copytree(provenance.PACKAGE, copy, ignore=shutil.ignore_patterns("__pycache__", "*.so", "*.lib"))
    monkeypatch.setattr(provenance, "PACKAGE", copy)
    provenance.code_of.cache_clear()
    yield copy
    provenance.code_of.cache_clear()


def code_of(service: str, sink: str, source: str = "") -> str:
    provenance.code_of.cache_clear()
    return provenance.code_of(service, sink, source)


@pytest.mark.parametrize(
    ("file", "changed"),
    [
        ("engine/decide.py", {(ENGINE, SQLITE), (SPARK, SQLITE), (ENGINE, KAFKA)}),
        ("model/work.py", {(ENGINE, SQLITE), (SPARK, SQLITE), (ENGINE, KAFKA)}),
        ("connectors/sqlite/writer.py", {(ENGINE, SQLITE), (SPARK, SQLITE)}),
        ("connectors/log/source.py", {(ENGINE, SQLITE), (SPARK, SQLITE), (ENGINE, KAFKA)}),
        ("clients/kafka/record_batch.c", {(ENGINE, SQLITE), (SPARK, SQLITE), (ENGINE, KAFKA)}),
        ("spark/writers.py", {(SPARK, SQLITE)}),
        ("connectors/postgres/writer.py", set()),
        ("cli/main.py", set()),
    ],
)
def test_a_cell_is_of_the_code_that_it_runs(package: Path, file: str, changed: set[tuple[str, str]]) -> None:
    cells = [(ENGINE, SQLITE), (SPARK, SQLITE), (ENGINE, KAFKA)]
    before = {c: code_of(*c) for c in cells}
    path = package / file
    path.write_text(path.read_text() + ("\nint other;\n" if path.suffix == ".c" else "\nOTHER = 1\n"))
    assert {c for c in cells if code_of(*c) != before[c]} == changed


def test_a_source_that_a_case_names_is_part_of_its_code(package: Path) -> None:
    before = code_of(ENGINE, SQLITE, "rabbitmq_stream")
    path = package / "connectors/rabbitmq/stream.py"
    path.write_text(path.read_text() + "\nOTHER = 1\n")
    assert code_of(ENGINE, SQLITE, "rabbitmq_stream") != before


def test_comments_and_docstrings_are_no_code(package: Path) -> None:
    before = code_of(ENGINE, SQLITE)
    path = package / "engine/decide.py"
    path.write_text(
        '"""Another text."""\n# another comment\n' + path.read_text().partition('"""')[2].partition('"""')[2]
    )
    assert code_of(ENGINE, SQLITE) == before


def test_an_installed_package_has_no_commit(package: Path) -> None:
    """Not that of a repository that its environment happens to lie in."""
    for args in (
        ["init", "-q"],
        ["-c", "user.name=x", "-c", "user.email=x@y", "commit", "-q", "--allow-empty", "-m", "x"],
    ):
        subprocess.run(["git", *args], cwd=package.parent, check=True)
    provenance.commit.cache_clear()
    try:
        assert provenance.commit() == ""
    finally:
        provenance.commit.cache_clear()


def result(verdict: str = "held", fault: str = "killed-between", sink: str = SQLITE) -> Result:
    return Result(sink, "exactly_once", "keyed", fault, 1, verdict, 0, 0, 4, True, service=ENGINE, place="F6b")


@pytest.fixture
def verdicts(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Of the next cases that run, in order; then they hold."""
    coming: list[str] = []

    def run(case: Case, environment: Any, plain_s: float | None = None, audit: bool = False) -> Result:
        environment.used.add("kafka")
        return result(coming.pop(0) if coming else "held", case.fault.name, case.sink)

    monkeypatch.setattr(matrix, "run_case", run)
    return coming


def test_a_cell_that_broke_and_held_later_keeps_both(verdicts: list[str], tmp_path: Path) -> None:
    verdicts += ["broken"]
    for _ in range(2):
        matrix.run_matrix(Choice((CASE,), service=ENGINE), Store(tmp_path / "v.json"), tmp_path / "cases")
    (found,) = read_cases(tmp_path / "v.json").values()
    assert [run[-1] for run in found.ran] == ["broken", "held"]
    assert found.verdict == "held"
    assert {run[2] for run in found.ran} == {provenance.code_of(ENGINE, SQLITE, "")}
    assert found.versions["kafka server"]
    assert found.versions["delivered"]


def test_a_verdict_of_older_code_is_no_verdict(
    verdicts: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    choice, path = Choice((CASE,), service=ENGINE), tmp_path / "v.json"
    assert len(matrix.run_matrix(choice, Store(path), tmp_path / "cases")) == 1
    assert matrix.run_matrix(choice, Store(path), tmp_path / "cases", resume=True) == []
    monkeypatch.setattr(matrix, "code_of", lambda *_: "of another code")
    assert len(matrix.run_matrix(choice, Store(path), tmp_path / "cases", resume=True)) == 1


def test_cells_that_are_published_of_this_code_run_last(verdicts: list[str], tmp_path: Path) -> None:
    choice = Choice(("sqlite/exactly_once/keyed/*", "postgres/exactly_once/keyed/*"), service=ENGINE)
    todo = matrix.cases(choice)
    current, older = result(fault=todo[0].fault.name), result(fault=todo[1].fault.name)
    for r in (current, older):
        r.record([])
    older.ran[-1][2] = "of another code"
    known = {r.key: r for r in (current, older)}
    ran = matrix.run_matrix(choice, Store(tmp_path / "v.json"), tmp_path / "cases", known=known)
    assert [r.key for r in ran] == [c.key for c in (*todo[1:], todo[0])]


def test_a_run_by_drivers_that_were_started_ahead_says_so_and_keeps_what_fresh_starts_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(published, "STORED", tmp_path / "verified.json")
    for start, plain_s, recovery_s in (("", 4.0, [5.0]), (AHEAD, None, []), ("", 6.0, [7.0])):
        one = result()
        one.service, one.start, one.plain_s, one.recovery_s = SPARK, start, plain_s, recovery_s
        one.record([])
        store = Store(tmp_path / f"v{plain_s}.json")
        store.add(one)
        published.store([store.path])
        (cell,) = published.load()
        assert cell.get("start", "") == start
        assert (cell["plain_s"], cell["recovery_s"]) == ((6.0, [7.0]) if plain_s == 6.0 else (4.0, [5.0]))
        assert f"In {int(bool(start))} cells" in "\n".join(published.runs([cell]))


def test_what_is_published_keeps_each_run_once(
    verdicts: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(published, "STORED", tmp_path / "verified.json")
    monkeypatch.setattr(provenance, "commit", lambda: "abc1234")
    verdicts += ["broken", "held"]
    choice, path = Choice((CASE,), service=ENGINE), tmp_path / "v.json"
    matrix.run_matrix(choice, Store(path), tmp_path / "cases")
    published.store([path])
    matrix.run_matrix(choice, Store(path), tmp_path / "cases")
    for _ in range(2):
        published.store([path])
    (cell,) = published.load()
    assert [run[1:2] + run[3:] for run in cell["ran"]] == [["abc1234", "broken"], ["abc1234", "held"]]
    assert not published.is_older(cell)
    assert published.cell([cell]) == "held (4)"
    assert "killed-between" in "\n".join(published.runs([cell]))
    assert "kafka server" in "\n".join(published.environments([cell]))
    code = cell["ran"][-1][2]
    cell["ran"][-1][2] = "of another code"
    now = {**cell, "ran": [[*cell["ran"][-1][:2], code, "held"]]}
    assert published.cell([cell]) == "held (4°)"
    assert published.cell([now, cell]) == "held (4 + 4°)"
    assert published.cell([{**now, "fired": 0}]) == "held (0)"
    assert published.cell([{**cell, "fired": 0}]) == "held (0°)"
    assert published.is_older({**cell, "ran": []})


def test_each_published_cell_names_a_commit() -> None:
    """With "+" behind it if files had changed since."""
    for cell in published.load():
        commits = [run[1] for run in cell["ran"]] if cell.get("ran") else [cell["stored"][1]]
        assert all(re.fullmatch(r"[0-9a-f]{7,40}\+?", commit) for commit in commits), cell


def test_a_run_takes_the_place_of_the_commit_that_stored_the_cell(
    verdicts: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(published, "STORED", tmp_path / "verified.json")
    verdicts.append("held")
    matrix.run_matrix(Choice((CASE,), service=ENGINE), Store(tmp_path / "v.json"), tmp_path / "cases")
    published.store([tmp_path / "v.json"])
    (cell,) = published.load()
    stored = {"stored": ["2026-11-22", "78d7d718"]}
    write_file(published.STORED, json.dumps({"format": 1, "results": [{**cell, "ran": [], **stored}]}))
    assert "2026-11-22" in "\n".join(published.runs(published.load()))
    published.store([tmp_path / "v.json"])
    (cell,) = published.load()
    assert "stored" not in cell and cell["ran"]
