"""`delivered status`, `top` and `metrics`: what is asked from outside, and what is said of it."""

from __future__ import annotations

import json
import time
import urllib.request
from pathlib import Path
from typing import Any

import psutil
import pyarrow as pa
import pytest
from tests.support.decided import checkpoint, decide, pipeline
from typer.testing import CliRunner

import delivered
from delivered.checkpoint import history
from delivered.cli.main import app
from delivered.connectors.log.produce import append
from delivered.engine.owner import _at
from delivered.model.batch_report import BatchReport
from delivered.model.work import Owner
from delivered.observe.metrics import serving, text
from delivered.observe.status import Driver, Status, status

YAML = """
pipeline: orders
guarantee: {guarantee}
checkpoint: {folder}/checkpoint
source: {{format: log, path: {folder}/in}}
sinks: [{{format: sqlite, path: {folder}/out.db, table: orders}}]
"""


def written(tmp_path: Path, guarantee: str = "exactly_once") -> Path:
    file = tmp_path / "orders.yaml"
    file.write_text(YAML.format(folder=tmp_path, guarantee=guarantee))
    return file


def stopped() -> Owner:
    process = psutil.Popen(["true"])
    owner = _at(Owner("owner"), process)
    process.wait()
    return owner


def decided(tmp_path: Path, batches: int, owner: Owner | None = None) -> delivered.Pipeline:
    made = pipeline(tmp_path)
    decide(made, batches, owner or _at(Owner("owner"), psutil.Process()))
    checkpoint(made, batches)
    return made


def codes(found: Status) -> list[str]:
    return [p.code.removeprefix("DELIVERED_") for p in found.problems]


def test_a_pipeline_that_never_started(tmp_path: Path) -> None:
    found = status(pipeline(tmp_path))
    assert (found.driver, found.batch, found.problems, found.transactions) == (Driver.NONE, None, (), None)


def test_a_running_pipeline(tmp_path: Path) -> None:
    made = decided(tmp_path, 3)
    found = status(made)
    assert (found.driver, found.batch, found.visible) == (Driver.RUNNING, 2, False)
    assert [(s.name, s.records, s.given_up) for s in found.sinks] == [("orders", 3, 0)]
    assert found.decided_age_s is not None and found.decided_age_s < 60
    assert json.loads(json.dumps(found.to_json()))["positions"] == {"source": {"version": 2, "offsets": {"0": 3}}}
    (Path(made.checkpoint) / "commits").mkdir()
    (Path(made.checkpoint) / "commits" / "2").write_text("v1\n{}")
    assert status(made).visible


def test_a_stopped_pipeline_with_waiting_records_is_a_problem_that_goes_away(tmp_path: Path) -> None:
    made = decided(tmp_path, 1, stopped())
    append(str(tmp_path / "in"), pa.table({"value": [b"b", b"c"]}), idempotence=("test", 2))
    found = status(made)
    assert (found.driver, found.lag_total) == (Driver.STOPPED, 2)
    assert codes(found) == ["STOPPED_WITH_LAG"]
    decide(made, 3, _at(Owner("later"), psutil.Process()))
    assert codes(status(made)) == []


def test_a_stalled_pipeline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = decided(tmp_path, 1)
    append(str(tmp_path / "in"), pa.table({"value": [b"b"]}), idempotence=("test", 2))
    assert codes(status(made)) == []
    now = time.time()
    monkeypatch.setattr("delivered.observe.status.time.time", lambda: now + 61)
    (problem,) = status(made).problems
    assert (problem.code, "1 offsets wait" in problem.text) == ("DELIVERED_STALLED", True)
    history.add(made.checkpoint, BatchReport(0, 1, {"orders": 1}, 1, 0, {"stage": 20.0}))
    assert codes(status(made)) == [], "its batches take 20 seconds"


def test_a_broken_audit_and_an_unreadable_ledger(tmp_path: Path) -> None:
    made = decided(tmp_path, 1)
    counts: dict[str, Any] = {"lost": 1}
    audit = {"sink": "orders", "at_ms": 1, "seconds": 1, "unknowns": [], "counts": counts}
    history.add_audit(made.checkpoint, {**audit, "verdict": "broken", "breaches": ["1 lost"]})
    assert codes(status(made)) == ["AUDIT_BROKEN"]
    history.add_audit(made.checkpoint, {**audit, "verdict": "held", "breaches": []})
    assert codes(status(made)) == []
    (tmp_path / "out.db").write_bytes(b"no database" * 500)
    assert len(codes(status(made))) == 1


def test_the_commands(tmp_path: Path) -> None:
    decided(tmp_path, 2)
    written(tmp_path)
    (tmp_path / "other.yaml").write_text("services: []")
    run = CliRunner().invoke
    shown = run(app, ["status", str(tmp_path)])
    assert shown.exit_code == 0, shown.output
    assert "orders" in shown.output and "exactly_once" in shown.output and "running" in shown.output
    (found,) = json.loads(run(app, ["status", str(tmp_path), "-o", "json"]).output)
    assert (found["batch"], found["lag_total"]) == (1, 0)
    (tmp_path / "bad.yaml").write_text("pipeline: x\nguarantee: some")
    shown = run(app, ["status", str(tmp_path)])
    assert shown.exit_code == 1
    assert "bad: [" in shown.output
    lines = run(app, ["top", str(tmp_path), "--looks", "2", "--every", "0.5", "-o", "json"]).output.splitlines()
    assert [json.loads(line)["pipeline"] for line in lines] == ["bad", "orders"] * 2
    empty = tmp_path / "empty"
    empty.mkdir()
    refused = run(app, ["status", str(empty)])
    assert (refused.exit_code, "NO_PIPELINES" in refused.output) == (2, True)


def test_metrics_in_prometheus_format(tmp_path: Path) -> None:
    pytest.importorskip("prometheus_client")
    from prometheus_client.parser import text_string_to_metric_families

    made = decided(tmp_path, 2, stopped())
    history.add(made.checkpoint, BatchReport(1, 1, {"orders": 1}, 1, 0, {"plan": 0.5}))
    append(str(tmp_path / "in"), pa.table({"value": [b"b"] * 3}), idempotence=("test", 2))
    samples = {
        (s.name, tuple(sorted(s.labels.items()))): s.value
        for family in text_string_to_metric_families(text([status(made)]))
        for s in family.samples
    }
    of = (("pipeline", "orders"),)
    assert samples["delivered_records_total", (("guarantee", "exactly_once"), *of, ("sink", "orders"))] == 2
    assert samples["delivered_step_seconds_total", (*of, ("step", "plan"))] == 0.5
    assert samples["delivered_driver_running", of] == 0
    assert samples["delivered_up", of] == 1
    assert samples["delivered_problems", (("code", "DELIVERED_STOPPED_WITH_LAG"), *of)] == 1


def test_metrics_are_served_anew_at_each_scrape(tmp_path: Path) -> None:
    pytest.importorskip("prometheus_client")
    made = decided(tmp_path, 1)
    with serving(lambda: [status(made)], 0) as port:

        def scrape() -> str:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
                return str(answer.read().decode())

        assert 'delivered_batch{pipeline="orders"} 0.0' in scrape()
        decide(made, 3, _at(Owner("owner"), psutil.Process()))
        assert 'delivered_batch{pipeline="orders"} 2.0' in scrape()


def test_the_report_is_one_file_that_needs_no_other_host(tmp_path: Path) -> None:
    made = decided(tmp_path, 3, stopped())
    file = written(tmp_path)
    for batch in (0, 2):
        history.add(made.checkpoint, BatchReport(batch, 1, {"orders": 5}, 2, batch, {"stage": 0.5, "apply": 0.1}))
    audit = {"sink": "orders", "at_ms": 1, "seconds": 1, "unknowns": [], "counts": {"lost": 1}}
    history.add_audit(made.checkpoint, {**audit, "verdict": "broken", "breaches": ["1 lost <script>"]})
    out = tmp_path / "page.html"
    done = CliRunner().invoke(app, ["report", str(file), "--out", str(out)])
    assert done.exit_code == 0, done.output
    page = out.read_text()
    for said in (
        "1 needs somebody",
        "DELIVERED_AUDIT_BROKEN",
        "1 lost &lt;script&gt;",
        "batch 2: 2 shards written again",
        "1 batches before 2: finished by a later start",
        "ledger row in the sink",
        "sqlite out.db orders",
    ):
        assert said in page, said
    assert "<script" not in page and "http" not in page.replace("http-equiv", "")


def test_the_served_page_asks_for_its_token_and_refuses_other_pages(tmp_path: Path) -> None:
    from starlette.testclient import TestClient

    from delivered.model.errors import UsageError
    from delivered.observe.server import application

    decided(tmp_path, 1)
    file = written(tmp_path)
    with pytest.raises(UsageError, match="UI_TOKEN"):
        application([file], address="0.0.0.0")
    open_to_all = TestClient(application([file]))
    assert "orders" in open_to_all.get("/").text
    assert open_to_all.get("/status.json").json()[0]["batch"] == 0
    client = TestClient(application([file], token="secret", address="0.0.0.0"))
    assert client.get("/").status_code == client.post("/end/0/abort/x").status_code == 401
    assert client.get("/", headers={"Authorization": "Bearer secret"}).status_code == 200
    elsewhere = client.post("/end/0/abort/x?token=secret", headers={"Origin": "http://evil.example"})
    assert elsewhere.status_code == 403
    answer = client.post("/end/0/abort/x?token=secret")
    assert (answer.status_code, "NO_TRANSACTIONS" in answer.text) == (409, True)


def test_alerts_and_dashboard_use_metrics_that_exist() -> None:
    import re

    from delivered.observe.metrics import StatusCollector

    families = StatusCollector(list).describe()
    known = {f"{f.name}_total" if f.type == "counter" else f.name for f in families}
    for file in ("prometheus-alerts.yml", "grafana-dashboard.json"):
        deploy = (Path(__file__).parents[2] / "deploy" / file).read_text()
        used = set(re.findall(r"\bdelivered_[a-z_]+", deploy))
        assert used and used <= known, (file, used - known)


def test_each_button_ends_a_transaction_of_its_own_pipeline() -> None:
    from delivered.observe.page import Way, page
    from delivered.pipeline.transactions import Open

    def holding(name: str, transaction: str, decided: bool) -> Status:
        return Status(name, "exactly_once", "", transactions=(Open(transaction, "prepared", 1.0, decided, ("t",)),))

    found = [(holding("a", "t/1", False), Way()), (holding("b", "t/2", True), Way())]
    shown = page(found, action=lambda number, id_, apply: f"/{number}/{id_}/{apply}")
    assert 'action="/0/t/1/False"><button>abort' in shown
    assert 'action="/1/t/2/True"><button>apply' in shown
