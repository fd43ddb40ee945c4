"""`delivered status`, `top` and `metrics`: what is asked from outside, and what is said of it."""

from __future__ import annotations

import dataclasses
import errno
import json
import os
import resource
import subprocess
import sys
import time
import urllib.request
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pyarrow as pa
import pytest
import yaml
from tests.support.decided import checkpoint, decide, pipeline
from typer.testing import CliRunner

import delivered
from delivered.checkpoint import history, unusable
from delivered.cli import command
from delivered.cli.main import app
from delivered.connectors.log.produce import append
from delivered.contract.source import DedupWindow
from delivered.engine.context import _place
from delivered.model.work import BatchReport, Owner
from delivered.operate.asking import status
from delivered.operate.metrics import serving, text
from delivered.operate.page import Actions, Flow, Frame, page, pipeline_page
from delivered.operate.rules import hanging_transactions, old_transactions, receiver_problems
from delivered.operate.status import Driver, Status
from delivered.operate.transactions import Open
from delivered.pipeline.receive import Presence, is_dead

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
    owner = _place(Owner("owner"), process)
    process.wait()
    return owner


def decided(tmp_path: Path, batches: int, owner: Owner | None = None) -> delivered.Pipeline:
    made = pipeline(tmp_path)
    decide(made, batches, owner or _place(Owner("owner"), psutil.Process()))
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
    decide(made, 3, _place(Owner("later"), psutil.Process()))
    assert codes(status(made)) == []


def test_a_stalled_pipeline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = decided(tmp_path, 1)
    append(str(tmp_path / "in"), pa.table({"value": [b"b"]}), idempotence=("test", 2))
    assert codes(status(made)) == []
    now = time.time()
    monkeypatch.setattr("time.time", lambda: now + 61)
    (problem,) = status(made).problems
    assert (problem.code, "1 offsets wait" in problem.text) == ("DELIVERED_STALLED", True)
    history.add(made.checkpoint, BatchReport(0, 1, {"orders": 1}, 1, 0, {"stage": 25.0}))
    assert codes(status(made)) == [], "its batches take 25 seconds"


def test_how_long_records_wait(tmp_path: Path) -> None:
    made = decided(tmp_path, 1)
    assert status(made).lag_s == {"source": {"0": 0.0}}
    append(str(tmp_path / "in"), pa.table({"value": [b"b", b"c"]}), idempotence=("test", 2))
    waits = status(made).lag_s_max
    assert waits is not None and 0 < waits < 60
    assert 'delivered_lag_offsets{partition="0",pipeline="orders",source="source"} 2.0' in text([status(made)])


def test_a_receiver_that_died_is_gone_until_another_one_takes_its_place(tmp_path: Path) -> None:
    queued = delivered.Pipeline(
        name="orders", guarantee="exactly_once", checkpoint=tmp_path / "checkpoint",
        source=delivered.endpoint("rabbitmq", url="amqp://localhost:1/", queue="q", log=str(tmp_path / "in")),
        sinks=[delivered.sqlite(str(tmp_path / "out.db"), "orders")],
    )  # fmt: skip
    pipeline(tmp_path)  # makes the log
    code = (
        "import os, sys; from delivered.pipeline.receive import Presence as P; P(sys.argv[1], {}).join(); os._exit(9)"
    )
    for _ in range(2):
        subprocess.run([sys.executable, "-c", code, str(tmp_path / "in")], check=False)
    found = status(queued)
    assert codes(found) == ["RECEIVER_GONE"], "the second took the place of the first"
    assert 'delivered_receivers{pipeline="orders",source="source",state="gone"} 1.0' in text([found])
    assert "1 dead" in page([(found, Flow())])
    here = Presence(str(tmp_path / "in"), {})
    here.join()
    (report,) = status(queued).receivers["source"]
    assert (report.owner.process, codes(status(queued))) == (os.getpid(), [])
    silent = dataclasses.replace(report, at_ms=report.at_ms - 31_000)
    assert is_dead(silent) and is_dead(dataclasses.replace(silent, owner=Owner("x", "elsewhere", 1)))
    here.leave()
    assert status(queued).receivers == {"source": ()}


def test_a_transaction_open_for_half_its_time_and_a_short_window() -> None:
    young, old = Open("a", "Ongoing", 299.0, False, ("t",), 600.0), Open("b", "Ongoing", 301.0, False, ("t",), 600.0)
    ages = Status("orders", "exactly_once", "", Driver.RUNNING, transactions=(young, old))
    assert [(p.code, p.text) for p in old_transactions(ages)] == [
        ("DELIVERED_TRANSACTION_OLD", "b has been open for 301 s, and its server aborts it after 600 s.")
    ]
    assert f'delivered_open_transaction_timeout_ratio{{decided="false",pipeline="orders"}} {301 / 600}' in text([ages])
    short = Status("orders", "exactly_once", "", windows={"source": DedupWindow(10.0, 1800.0, 100.0)})
    (problem,) = receiver_problems(short)
    assert (problem.code, problem.next_step) == (
        "DELIVERED_DEDUP_WINDOW_SHORT",
        "restart the receivers with dedupFor of at least 30 minutes",
    )


def test_p28_a_transaction_whose_end_was_lost() -> None:
    lost = Open("a", "Hanging", None, True, ("t-0",), 600.0, hanging=True)
    (problem,) = hanging_transactions(Status("orders", "exactly_once", "", Driver.RUNNING, transactions=(lost,)))
    assert problem.code == "DELIVERED_TRANSACTION_HANGING"
    assert "a was committed" in problem.text
    assert "t-0" in problem.text
    assert "delivered transactions apply PIPELINE.yaml a" in str(problem.next_step)


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


def test_the_pipelines_of_a_ledger_without_their_files(tmp_path: Path) -> None:
    """Also one whose checkpoint is gone: the newest decision of any."""
    made = decided(tmp_path, 2, stopped())
    other: Any = SimpleNamespace(name="refunds", sources=made.sources, sinks=made.sinks, guarantee=made.guarantee)
    decide(other, 3, _place(Owner("owner"), psutil.Process()))
    file = tmp_path / "where.yaml"
    file.write_text(f"ledger: {{format: sqlite, path: {tmp_path}/out.db, table: orders}}")
    (orders, refunds) = json.loads(CliRunner().invoke(app, ["status", str(file), "-o", "json"]).output)
    assert [(s["pipeline"], s["guarantee"], s["batch"], s["driver"]) for s in (orders, refunds)] == [
        ("orders", "exactly_once", 1, "stopped"),
        ("refunds", "exactly_once", 2, "running"),
    ]
    assert refunds["sinks"][0]["records"] == 3 and refunds["positions"]["source"]["offsets"] == {"0": 3}
    file.write_text("ledger: somewhere")
    (failed,) = json.loads(CliRunner().invoke(app, ["status", str(file), "-o", "json"]).output)
    assert failed["problems"][0]["code"] == "DELIVERED_LEDGER_FILE"


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
        decide(made, 3, _place(Owner("owner"), psutil.Process()))
        assert 'delivered_batch{pipeline="orders"} 2.0' in scrape()


def test_a_result_that_cannot_be_written_leaves_the_one_before(tmp_path: Path) -> None:
    out = tmp_path / "page.html"
    command.write_file(out, "first")
    (tmp_path / "link").symlink_to(out)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10, limits[1]))
    try:
        with pytest.raises(OSError, match=r"page\.html"):
            command.write_file(out, "x" * 100)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert out.read_text() == "first"
    command.write_file(tmp_path / "link", "second")
    command.write_file(Path("/dev/null"), "third")
    assert (out.read_text(), Path("/dev/null").is_file()) == ("second", False)
    assert {p.name for p in tmp_path.iterdir()} == {"link", "page.html"}
    assert "free disk space" in str(unusable("c", OSError(errno.ENOSPC, "No space left on device")))


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
    shown = out.read_text()
    for said in (
        "1 needs somebody",
        "DELIVERED_AUDIT_BROKEN",
        "1 lost &lt;script&gt;",
        "batch 2: 2 shards written again",
        "1 batches before 2: finished by a later start",
        "ledger row in the sink",
        "sqlite out.db orders",
    ):
        assert said in shown, said
    assert "<script" not in shown and "http" not in shown.replace("http-equiv", "")


def test_the_served_page_asks_for_its_token_and_refuses_other_pages(tmp_path: Path) -> None:
    from starlette.testclient import TestClient

    from delivered.model.errors import UsageError
    from delivered.operate.server import application

    decided(tmp_path, 1)
    file = written(tmp_path)
    with pytest.raises(UsageError, match="UI_TOKEN"):
        application([file], address="0.0.0.0")
    open_to_all = TestClient(application([file]), base_url="http://127.0.0.1")
    assert "orders" in open_to_all.get("/").text
    assert open_to_all.get("/status.json").json()[0]["batch"] == 0
    client = TestClient(application([file], token=SECRET, address="0.0.0.0", actions=True))
    assert client.get("/").status_code == client.post("/end/0/abort/x").status_code == 401
    bearer = {"Authorization": f"Bearer {SECRET}"}
    assert client.get("/", headers=bearer).status_code == 200
    assert client.post(f"/end/0/abort/x?token={SECRET}").status_code == 401, "an address is not enough for a button"
    elsewhere = client.post("/end/0/abort/x", headers={**bearer, "Origin": "http://evil.example"})
    assert elsewhere.status_code == 403
    answer = client.post("/end/0/abort/x", headers=bearer)
    assert (answer.status_code, "NO_TRANSACTIONS" in answer.text) == (409, True)


SECRET = "a-token-of-24-characters"


@pytest.mark.parametrize("token", ["", "short", "fifteen-letters"])
@pytest.mark.parametrize("address", ["0.0.0.0", "127.0.0.1"])
def test_no_token_is_short(token: str, address: str) -> None:
    from delivered.model.errors import UsageError
    from delivered.operate.server import application

    with pytest.raises(UsageError, match=f"UI_TOKEN.*{len(token)} characters"):
        application([], token=token, address=address)


@pytest.mark.parametrize(
    ("token", "said"), [("env:UI_TEST_TOKEN", "0 characters"), ("a" * 40, "--token must be a reference")]
)
def test_the_command_line_takes_a_token_by_reference(
    token: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from typer.testing import CliRunner

    from delivered.cli.main import app

    monkeypatch.setenv("UI_TEST_TOKEN", "")
    done = CliRunner().invoke(app, ["ui", str(written(tmp_path)), "--address", "0.0.0.0", "--token", token])
    assert done.exit_code == 2
    assert "UI_TOKEN" in done.output and said in " ".join(done.output.split())


@pytest.mark.parametrize(
    "host",
    [
        "evil.example",
        "evil.example:8090",
        "127.0.0.1.evil.example",
        "",
        "[",
        "localhost@evil",
        "evil@localhost",
        "evil:80@localhost:80",
        "localhost/evil",
        "localhost#evil",
        "localhost?x",
        "localhost:evil",
        "localhost.",
        "127.0.0.1.",
        "::1",
        "[localhost]",
        "127.1",
        "0x7f000001",
    ],
)
def test_another_site_that_points_its_name_here_gets_nothing(host: str, tmp_path: Path) -> None:
    from starlette.testclient import TestClient

    from delivered.operate.server import application

    for token in (None, SECRET):
        client = TestClient(application([written(tmp_path)], token=token), base_url="http://127.0.0.1")
        headers = {"Host": host, "Authorization": f"Bearer {SECRET}"}
        answers = [client.get("/", headers=headers), client.get("/status.json", headers=headers),
                   client.post("/end/0/abort/x", headers={**headers, "Sec-Fetch-Site": "same-origin"})]  # fmt: skip
        assert {a.status_code for a in answers} == {421}
        assert all(a.headers["x-content-type-options"] == "nosniff" for a in answers)
    two = [("Host", "localhost"), ("Host", host), ("Authorization", f"Bearer {SECRET}")]
    assert client.get("/status.json", headers=two).status_code == 421
    for name in ("localhost:9000", "LOCALHOST", "[::1]:8090", "[::1]", "127.0.0.1"):
        assert client.get("/status.json", headers={**headers, "Host": name}).status_code == 200
    known = TestClient(application([], token=SECRET, hosts=("Pipelines.example",)), base_url="http://pipelines.example")
    assert known.get("/", headers=headers | {"Host": "pipelines.example"}).status_code == 200


@pytest.mark.parametrize("origin", [
    {}, {"Sec-Fetch-Site": "cross-site"}, {"Sec-Fetch-Site": "same-site"}, {"Sec-Fetch-Site": "none"},
    {"Origin": "null"}, {"Origin": "http://127.0.0.1:8091"},
    {"Origin": "http://127.0.0.1", "Sec-Fetch-Site": "cross-site"}, {"Origin": "http://["}, {"Origin": ""},
    {"Origin": "http://evil@127.0.0.1"}, {"Origin": "http://127.0.0.1/x"}, 
    {"Origin": "null", "Sec-Fetch-Site": "same-origin"},
    [("Sec-Fetch-Site", "same-origin"), ("Sec-Fetch-Site", "cross-site")],
    [("Origin", "http://127.0.0.1"), ("Origin", "http://evil.example")],
])  # fmt: skip
def test_a_button_works_from_the_page_alone(origin: Any, tmp_path: Path) -> None:
    from starlette.testclient import TestClient

    from delivered.operate.server import application

    made = application([written(tmp_path)])
    client, form = TestClient(made, base_url="http://127.0.0.1"), {"csrf": made.state.csrf}
    assert client.post("/end/0/abort/x", headers=origin, data=form).status_code == 403
    for own in ({"Origin": "http://127.0.0.1"}, {"Sec-Fetch-Site": "same-origin"}):
        assert client.post("/end/0/abort/x", headers=own, data=form).status_code == 409, "no such transaction"
        assert client.post("/end/0/abort/x", headers=own).status_code == 403, "without the secret of the page"


@pytest.mark.parametrize(
    "path",
    [
        "/end/" + "9" * 5000 + "/abort/x",
        "/end/%D9%A0/abort/x",
        "/end/00/abort/x",
        "/end/0/anything/x",
        "/end/0/APPLY/x",
        "/end/99/abort/x",
        "/end/x/abort/x",
        "/end/0/abort",
    ],
)
def test_an_action_that_does_not_exist_ends_nothing(path: str, tmp_path: Path) -> None:
    from starlette.testclient import TestClient

    from delivered.operate.server import application

    made = application([written(tmp_path)])
    client, form = TestClient(made, base_url="http://127.0.0.1"), {"csrf": made.state.csrf}
    assert client.post(path, headers={"Sec-Fetch-Site": "same-origin"}, data=form).status_code == 404


def test_a_client_that_does_not_finish_its_request_is_disconnected(monkeypatch: pytest.MonkeyPatch) -> None:
    import socket
    import threading

    import uvicorn

    from delivered.operate import server as page_server
    from delivered.operate.server import application

    monkeypatch.setattr(page_server, "HEADERS_TIMEOUT_S", 0.3)
    listener = socket.create_server(("127.0.0.1", 0))
    config = uvicorn.Config(application([]), http=page_server.timed_protocol(), log_level="error")
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, args=([listener],))
    thread.start()
    try:
        for sent in (
            b"",
            b"GET / HT",
            b"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\nX: ",
            b"GET /none HTTP/1.1\r\nHost: localhost\r\n\r\nGET /",
        ):
            with socket.create_connection(listener.getsockname(), 30) as client:
                client.sendall(sent)
                while client.recv(4096):
                    pass  # until the server closes the connection; the socket's time-out fails the test
    finally:
        server.should_exit = True
        thread.join()


def test_alerts_and_dashboard_use_metrics_that_exist() -> None:
    import re

    from delivered.operate.metrics import StatusCollector

    families = StatusCollector(list).describe()
    known = {f"{f.name}_total" if f.type == "counter" else f.name for f in families}
    for file in ("prometheus-alerts.yml", "grafana-dashboard.json"):
        deploy = (Path(__file__).parents[2] / "deploy" / file).read_text()
        used = set(re.findall(r"\bdelivered_[a-z_]+", deploy))
        assert used and used <= known, (file, used - known)


def test_each_alert_has_one_rule() -> None:
    """A second one of the same name fires on when the first is over."""
    rules = yaml.safe_load((Path(__file__).parents[2] / "deploy" / "prometheus-alerts.yml").read_text())
    names = [rule["alert"] for group in rules["groups"] for rule in group["rules"]]
    assert len(names) > 10 and not [name for name, count in Counter(names).items() if count > 1]


def test_each_button_ends_a_transaction_that_no_driver_will() -> None:
    def holding(driver: Driver, transaction: str, decided: bool, age_s: float = 1.0) -> str:
        now_ms = time.time_ns() // 1_000_000
        open_ = Open(transaction, "prepared", age_s, decided, ("t",))
        s = Status("a", "exactly_once", "", driver, decided_at_ms=now_ms - 10_000, transactions=(open_,))
        actions = Actions("secret", lambda id_, apply: f"/{id_}/{apply}")
        return pipeline_page(s, Flow(), frame=Frame(), actions=actions)

    shown = holding(Driver.STOPPED, "t/1", False)
    assert 'action="/t/1/False"><input type="hidden" name="csrf" value="secret">' in shown
    assert '<button aria-label="abort t/1">abort' in shown
    assert '<button aria-label="apply t/2">apply' in holding(Driver.STOPPED, "t/2", True)
    for driver in (Driver.RUNNING, Driver.ELSEWHERE):
        shown = holding(driver, "t/1", False)
        assert "<button" not in shown and "of the running batch" in shown
        assert "abort</button>" in holding(driver, "t/1", False, age_s=60.0), "older than the newest decision"
    assert "<button" not in holding(Driver.RUNNING, "t/2", True), "the driver applies it"
