"""The pages, served over HTTP from real checkpoints: overview, one page a pipeline, and forms with their refusals."""

from __future__ import annotations

import http.client
import re
import socket
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import psutil
import pytest
import uvicorn
from rich.console import Console
from starlette.testclient import TestClient
from tests.support import watched
from tests.support.watched import checkpoint, now_ms, sent, with_dead_letters, written
from tests.support.without_spark import deliver

from delivered import Pipeline
from delivered.checkpoint import history
from delivered.checkpoint.history import NewDeadLetters, Run, Sample, State
from delivered.cli.status import Trends, table
from delivered.model.work import BatchReport
from delivered.operate import chart
from delivered.operate import server as page_server
from delivered.operate.asking import status
from delivered.operate.dead_letters import DeadLetter
from delivered.operate.page import COLUMNS, Actions, Flow, Frame, Order, Row, dead_letters_page, overview, pipeline_page
from delivered.operate.server import application
from delivered.operate.status import Driver, Pace, Problem, SinkStatus, Status
from delivered.operate.transactions import is_current

EVIL = "<script>alert(1)</script><img src=x onerror=alert(2)>\"'>"
SECRET = "a-token-of-24-characters"


@dataclass
class Site:
    """A server of pages."""

    port: int
    app: Any
    folder: Path

    def ask(
        self, path: str, form: Mapping[str, Any] | bytes | None = None, method: str = "", **headers: str
    ) -> tuple[int, str, dict[str, str]]:
        """Status, text and headers. `form`: posted, from the site itself unless `headers` say otherwise."""
        if isinstance(form, Mapping):
            form = urlencode(form, doseq=True).encode()
        if form is not None:
            headers = {"Origin": f"http://127.0.0.1:{self.port}"} | headers
            headers = {n: v for n, v in headers.items() if v}
        with closing(http.client.HTTPConnection("127.0.0.1", self.port, timeout=30)) as connection:
            connection.request(method or ("GET" if form is None else "POST"), path, form, headers)
            answer = connection.getresponse()
            return answer.status, answer.read().decode(), {n.lower(): v for n, v in answer.getheaders()}


@contextmanager
def served(folder: Path, files: list[Path], **options: Any) -> Iterator[Site]:
    app = application(files, **options)
    listener = socket.create_server(("127.0.0.1", 0))
    server = uvicorn.Server(uvicorn.Config(app, log_level="error", http=page_server.timed_protocol()))
    thread = threading.Thread(target=server.run, args=([listener],))
    thread.start()
    try:
        yield Site(listener.getsockname()[1], app, folder)
    finally:
        server.should_exit = True
        thread.join()


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """`orders` has three dead letters, `never` was not started."""
    folder = tmp_path_factory.mktemp("site")
    with watched.importable(folder):
        orders = with_dead_letters(folder, "orders", [b"1", b"two", b"3", EVIL.encode(), b"five"])
        with served(folder, [written(folder, "never"), orders]) as one:
            yield one


def until(fact: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 300
    while not fact():
        assert time.monotonic() < deadline


class _Parts(HTMLParser):
    """What a browser makes of a page."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: set[str] = set()
        self.attributes: set[str] = set()
        self.addresses: set[str] = set()
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.attributes |= {name for name, _ in attrs}
        self.addresses |= {str(v) for name, v in attrs if name in ("href", "action", "formaction", "src")}


def assert_harmless(page: str) -> None:
    parts = _Parts(page)
    assert not parts.tags & {"script", "img", "iframe", "link", "object", "embed", "base"}
    assert not [name for name in parts.attributes if name.startswith("on") or name == "src"]
    assert all(address.startswith(("/", "#")) for address in parts.addresses)


def test_the_overview_leads_to_a_page_for_each(site: Site) -> None:
    code, page, headers = site.ask("/")
    assert code == 200 and "default-src 'none'" in headers["content-security-policy"]
    assert page.index("DELIVERED_DEAD_LETTERS") and "3 new" in page and 'href="/pipelines/orders"' in page
    assert_harmless(page)
    links = set(re.findall(r'href="(/\?sort=[^"]*)"', page))
    assert len(links) >= len(COLUMNS)
    for link in links:
        assert site.ask(link.replace("&amp;", "&"))[0] == 200
    by_name = [site.ask(f"/?sort={order}")[1] for order in ("name", "-name")]
    assert [p.index("/pipelines/never") < p.index("/pipelines/orders") for p in by_name] == [True, False]
    assert site.ask("/?sort=" + urlencode({"": EVIL}))[0] == 200
    _, page, _ = site.ask("/pipelines/orders?hours=24&paused")
    assert "Read, retry or drop them" in page and "http-equiv" not in page
    assert site.ask("/pipelines/nobody")[0] == 404
    assert site.ask("/pipelines/orders?hours=-1")[0] == 200


def test_reading_changes_nothing_and_each_form_is_refused_unless_it_is_of_this_page(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    where = "/pipelines/orders/dead-letters"
    page = site.ask(where)[1]
    assert_harmless(page)
    (csrf,) = set(re.findall(r'name="csrf" value="([^"]+)"', page))
    ids = re.findall(r'name="id" value="([^"]+)"', page)
    assert len(ids) == 3 and page.count("ZeroDivisionError") == 3 and "&lt;script&gt;" in page
    form: dict[str, Any] = {"csrf": csrf, "id": ids}
    refused = [
        (403, "another page", where + "/drop", form, {"Origin": "http://evil.example"}),
        (403, "another page", where + "/drop", form, {"Origin": "null"}),
        (403, "another page", where + "/retry", form, {"Sec-Fetch-Site": "cross-site"}),
        (403, "no page", where + "/retry", form, {"Origin": ""}),
        (403, "another start", where + "/retry", form | {"csrf": "guessed"}, {}),
        (403, "another start", where + "/read", {"id": ids}, {}),
        (403, "another start", "/end/0/abort/x", {}, {}),
        (400, "Choose", where + "/retry", {"csrf": csrf}, {}),
        (400, "Choose", where + "/drop", {"csrf": csrf, "which": "all"}, {}),
        (400, "Choose", where + "/retry", form | {"which": "all"}, {}),
        (400, "no form", where + "/retry", b"\xff=1", {}),
        (404, "no such action", where + "/delete", form, {}),
        (404, "no pipeline file", "/pipelines/x/dead-letters/drop", form, {}),
        (409, "DELIVERED_DEAD_LETTER_UNKNOWN", where + "/retry", {"csrf": csrf, "id": EVIL}, {}),
        (409, "DELIVERED_DEAD_LETTERS_NONE", "/pipelines/never/dead-letters/retry", {"csrf": csrf, "which": "all"}, {}),
        (409, "DELIVERED_NO_TRANSACTIONS", "/end/1/abort/x", {"csrf": csrf}, {}),
        (413, "at most", where + "/retry", b"x" * (page_server.BODY_BYTES_MAX + 1), {}),
    ]  # fmt: skip
    for code, text, path, sent_form, headers in refused:
        found, answer, _ = site.ask(path, sent_form, **headers)
        assert (found, text in answer) == (code, True), (path, sent_form, headers, found, answer[-300:])
        assert_harmless(answer)
    for path in (where + "/drop", "/end/1/abort/x"):
        assert site.ask(path)[0] == 405, "GET changes nothing"
    monkeypatch.setattr(page_server, "BODY_TIMEOUT_S", 0.2)
    with closing(socket.create_connection(("127.0.0.1", site.port), 30)) as slow:
        slow.sendall(
            f"POST {where}/drop HTTP/1.1\r\nHost: 127.0.0.1\r\nOrigin: http://127.0.0.1\r\n"
            f"Content-Length: 9\r\n\r\ncsrf=".encode()
        )
        assert slow.recv(4096).startswith(b"HTTP/1.1 408")
    assert len(re.findall(r'name="id"', site.ask(where)[1])) == 3, "nothing was settled"
    assert status(Pipeline.from_file(site.folder / "orders.yaml")).new_dead_letters["dead"].count == 3


def test_dead_letters_are_read_retried_and_dropped(site: Site) -> None:
    where, file = "/pipelines/orders/dead-letters", site.folder / "orders.yaml"
    page = site.ask(where)[1]
    (csrf,) = set(re.findall(r'name="csrf" value="([^"]+)"', page))
    ids = re.findall(r'name="id" value="([^"]+)"', page)
    assert re.findall(r'name="seen" value="([^"]+)"', page) == ["3 dead"]
    form: dict[str, Any] = {"csrf": csrf, "seen": "2 dead"}
    code, _, headers = site.ask(where + "/read", form)
    assert (code, headers["location"]) == (303, "/pipelines/orders")
    assert "1 new" in site.ask("/pipelines/orders")[1], "what came after the page was made is not read"
    site.ask(where + "/read", form | {"seen": ["99 dead", "9" * 5000 + " dead"]})
    pipeline = Pipeline.from_file(file)
    assert status(pipeline).new_dead_letters["dead"] == NewDeadLetters(
        0, status(pipeline).new_dead_letters["dead"].since_ms
    )
    code, answer, _ = site.ask(where + "/retry", {"csrf": csrf, "id": ids[0]})
    assert code == 200 and "nothing retried" in answer and f"{ids[0]}: still rejected" in answer
    watched.mended(site.folder, "orders")
    code, answer, _ = site.ask(where + "/retry", {"csrf": csrf, "id": ids[0]})
    assert code == 200 and "1 retried at rows" in answer, answer[-500:]
    with closing(sqlite3.connect(site.folder / "orders" / "out.db")) as rows:
        assert rows.execute("SELECT count(*) FROM rows").fetchone() == (3,)
    code, answer, _ = site.ask(where + "/retry", {"csrf": csrf, "id": ids[0]})
    assert code == 409 and "DELIVERED_DEAD_LETTER_SETTLED" in answer
    assert "2 dropped" in site.ask(where + "/drop", {"csrf": csrf, "id": ids[1:]})[1]
    assert "None are open" in site.ask(where)[1] and site.ask(where + "?settled")[1].count("dropped") == 2


def test_nothing_is_changed_where_it_was_not_allowed(site: Site) -> None:
    file = site.folder / "orders.yaml"
    bearer = {"Authorization": f"Bearer {SECRET}"}
    away: dict[str, Any] = {"address": "0.0.0.0", "token": SECRET}
    for options in (away, {"hosts": ("pages.example",)}, {"actions": False}):
        app = application([file], **options)
        client = TestClient(app, base_url="http://127.0.0.1", headers=bearer)
        for path in ("/end/0/abort/x", "/pipelines/orders/dead-letters/drop"):
            own = {"Origin": "http://127.0.0.1"}
            answer = client.post(path, data={"csrf": app.state.csrf, "id": "x"}, headers=own)
            assert answer.status_code == 403 and "delivered ui --actions" in answer.text
    assert "<form" not in client.get("/pipelines/orders/dead-letters?settled").text
    with served(site.folder, [file], **away, actions=True) as other:
        assert other.ask("/end/0/abort/x", {}, **bearer)[0] == 409
        assert other.ask("/end/0/abort/x", {"csrf": other.app.state.csrf})[0] == 401


def hostile(folder: Path) -> Status:
    """Everything that others write says something evil."""
    now, where = now_ms(), str(folder)
    (folder / "delivered").mkdir()
    for n in range(3):
        lag, read = {f"{EVIL}{n}": 7, "p": 1}, {EVIL: 7, "p": 1}
        history._append(where, history.SAMPLES, Sample(now - 9_000 + n * 1000, EVIL, lag, read).__dict__)
        history._append(where, history.STATES, State(now, n, {EVIL: 1}, {EVIL: 1}, {EVIL: 1}).__dict__)
    history.add(where, BatchReport(1, now, {EVIL: 5}, 1, 2, {"stage": 0.5}, 5))
    audit = {"sink": EVIL, "at_ms": now, "seconds": 1, "verdict": "broken", "breaches": [EVIL], "unknowns": []}
    history.add_audit(where, audit | {"counts": {"lost": 1}})
    run = Run("1", EVIL, 1, now - 9, now, 4, EVIL, EVIL, EVIL)
    return Status(
        EVIL, EVIL, where, Driver.STOPPED, batch=1, sinks=(SinkStatus(EVIL, EVIL, 1, 0, True, EVIL),), runs=(run, run),
        lag={EVIL: {EVIL: 7}}, audits={EVIL: audit}, problems=(Problem(EVIL, EVIL, EVIL),),
        new_dead_letters={EVIL: NewDeadLetters(1, None)}, asked_ms=now + 1,
    )  # fmt: skip


def test_what_others_wrote_stays_text(tmp_path: Path) -> None:
    s = hostile(tmp_path)
    actions = Actions(EVIL, lambda id_, apply: "/end", dict.fromkeys(("read", "retry", "drop"), "/x"))
    flow = Flow(((EVIL, EVIL),), ((EVIL, EVIL),), EVIL)
    letter = DeadLetter(EVIL, EVIL, EVIL, 1, 1, EVIL, topic=EVIL, partition=1, offset=1)
    listed = dead_letters_page(EVIL, [letter], file=EVIL, frame=Frame(links=((EVIL, "/"),)), actions=actions,
                               seen={EVIL: 1}, more=True, settled=True)  # fmt: skip
    own = pipeline_page(s, flow, frame=Frame(), actions=actions, dead_letters="/x", link=lambda hours: f"/?{hours}")
    row = Row.of(s, "/pipelines/x")
    for page in (listed, own, overview([row], order=Order(), frame=Frame(), link=lambda order: f"/?{order}")):
        assert_harmless(page)
        assert "&lt;script&gt;" in page
    assert all(word in own for word in ("Rate and lag", "State", "Batches", "Runs", "Audits", "shards written again"))


def test_those_that_need_somebody_come_first_and_columns_sort() -> None:
    pace = Pace(70.0, 50.0, 900, grows=True)
    trouble = (Problem("DELIVERED_STALLED", "", None),)
    failed = Run("1", "h", 1, 1_000, 5_000, 3, "DELIVERED_X", "why", "")
    rows = [
        Row.of(Status("calm", "", "", Driver.RUNNING, lag={"s": {"0": 5}})),
        Row.of(Status("busy", "", "", Driver.RUNNING, lag={"s": {"0": 900}}, pace=pace, problems=trouble)),
        Row.of(Status("away", "", "", Driver.UNKNOWN)),
        Row.of(Status("failed", "", "", Driver.STOPPED, runs=(failed,), lag={"s": {"0": 9}}, problems=trouble * 2)),
    ]

    def names(order: str) -> list[str]:
        return [r.status.pipeline for r in Order.parse(order).sorted(rows)]

    assert names("") == names("nonsense") == ["failed", "busy", "away", "calm"]
    assert names("lag") == ["busy", "failed", "calm", "away"], "unknown is last"
    assert names("-lag") == ["calm", "failed", "busy", "away"], "unknown is last"
    assert names("name") == ["away", "busy", "calm", "failed"]
    by_name = {r.status.pipeline: r for r in rows}
    assert (by_name["failed"].state, by_name["failed"].since_ms) == ("failed", 5_000)
    assert (by_name["busy"].trend, by_name["busy"].in_per_s) == ("grows", "70")
    order = Order.parse("lag")
    assert (order.next(order.column), order.sign(order.column)) == ("-lag", "▼")


def reports(seconds: list[float]) -> list[BatchReport]:
    return [BatchReport(n, n, {"t": 1}, 1, 0, {"stage": s}) for n, s in enumerate(seconds)]


def heights(drawn: str) -> list[float]:
    return [float(h) for h in re.findall(r'<rect class="c1"[^>]* height="([\d.]+)"', drawn)]


def test_an_outlier_does_not_flatten_the_other_batches() -> None:
    drawn = chart.batches(reports([0.4] * 30 + [60.0] + [0.4] * 9))
    high = heights(drawn)
    assert max(high) == 100 and min(high) >= 50, "the others are seen"
    assert "60 s</span>" in drawn and drawn.count('class="cut"') == 1
    drawn = chart.batches(reports([0.4, 0.5, 0.6]))
    assert max(heights(drawn)) == 100 and 'class="cut"' not in drawn, "nothing is cut off without need"
    several = chart.batches(reports([0.1] * 10 + [3.0] * 10))
    assert min(heights(several)) > 10 and several.count('class="cut"') == 10


def test_a_gap_is_no_line_a_peak_stays_and_a_chart_is_bounded() -> None:
    points = [(n * 1000, 1.0) for n in range(20_000)]
    points[777] = (777_000, 3.0)
    drawn = chart.lines("Lag", [chart.Series("p", points)], chart.Span(0, 20_000_000, 30_000))
    (path,) = re.findall(r' d="([^"]*)"', drawn)
    assert path.count("L") <= chart.POINTS_MAX and path.count("M") <= 2 and " 0.00" in path, "the peak reaches the top"
    points = [(0, 5.0), (5_000, 5.0), (90_000, 5.0), (95_000, 5.0)]
    drawn = chart.lines("Lag", [chart.Series("p", points)], chart.Span(0, 95_000, 30_000))
    assert re.findall(r' d="([^"]*)"', drawn)[0].count("M") == 2, "nothing is drawn where no batch was planned"
    many = [chart.Series(f"p{n}", [(0, float(n)), (1, float(n))]) for n in range(1000)]
    drawn = chart.lines("Lag", many, chart.Span(0, 1, 1))
    assert drawn.count("<path") == chart.SERIES_MAX and "993 others, at most 992" in drawn and "p999" in drawn
    spike = [chart.Series("in", [(n, 10.0) for n in range(100)] + [(100, 5000.0)])]
    drawn = chart.lines("Rate", spike, chart.Span(0, 100, 10))
    assert "5,000</span>" in drawn and ">16</span>" in drawn, "cut off, with its value"


@pytest.mark.parametrize(
    ("value", "end"), [(0.0, 1.0), (0.3, 0.3), (52_000.0, 60_000.0), (99.0, 100.0), (1.0, 1.0), (0.0011, 0.0012)]
)
def test_the_end_of_a_scale(value: float, end: float) -> None:
    assert chart.nice(value) == pytest.approx(end)


def test_which_transaction_is_of_the_running_batch() -> None:
    assert is_current(1.0, True, 10.0) and is_current(1.0, None, 10.0) and is_current(None, True, None)
    assert not is_current(1.0, False, 10.0), "its driver has ended"
    assert not is_current(16.0, True, 10.0), "older than the newest decision"


def test_top_shows_which_way_lag_and_rate_go() -> None:
    trends, base = Trends(), Status("p", "", "", Driver.RUNNING, sinks=(SinkStatus("s", "log", 0, 0),))
    for n in range(40):
        sink = SinkStatus("s", "log", n * 100, 0)
        s = replace(base, sinks=(sink,), lag={"s": {"0": 1000 + n * 300}})
        trends.add([s], n * 2.0)
    assert (trends.lag_arrow("p"), trends.rate_arrow("p"), trends.rate("p")) == ("↑", "→", 50.0)
    console = Console(width=200, record=True, file=open("/dev/null", "w"))  # noqa: SIM115, PTH123
    console.print(table([s], trends))
    shown = console.export_text()
    assert "12,700 ↑" in shown and "50 →" in shown
    for n in range(40, 80):
        trends.add([replace(s, lag={"s": {"0": 20_000 - n * 200}})], n * 2.0)
    assert (trends.lag_arrow("p"), trends.rate_arrow("p")) == ("↓", "→"), "by the last minute alone"
    steady = Trends()
    steady.add([s], 0.0)
    assert steady.lag_arrow("p") == "" and steady.rate("p") is None


def test_the_size_of_the_state_is_kept_once_a_batch(tmp_path: Path) -> None:
    (tmp_path / "delivered").mkdir()
    kept = history.States(str(tmp_path))
    operator = {"operatorName": "dedupe", "numRowsTotal": 5, "memoryUsedBytes": 100, "numRowsDroppedByWatermark": 2}
    for progress in (None, {"batchId": 1, "stateOperators": []}, *[{"batchId": 2, "stateOperators": [operator]}] * 2):
        kept.keep(progress)
    (state,) = history.states(str(tmp_path))
    assert (state.batch, state.rows, state.late) == (2, {"0 dedupe": 5}, {"0 dedupe": 2})


@pytest.mark.matrix
def test_pipelines_that_do_not_answer_hide_no_others(tmp_path: Path) -> None:
    """A server that accepts connections and says nothing: of twelve pipelines, eight are asked at a time."""
    with socket.create_server(("127.0.0.1", 0), backlog=200) as silent:
        sink = {"format": "postgres", "dbtable": "t"} | {"url": f"postgresql://u@127.0.0.1:{silent.getsockname()[1]}/d"}
        files = [written(tmp_path, f"away{n}", sinks=[sink]) for n in range(12)]
        files.append(written(tmp_path, "there"))
        with served(tmp_path, files) as site:
            waiting = re.findall(r", (\d+) not answered yet", site.ask("/")[1])
            assert waiting and int(waiting[0]) >= 4
            until(lambda: "never started" in site.ask("/pipelines/there")[1])
            until(lambda: "not answered yet" not in site.ask("/")[1])
            page = site.ask("/")[1]
            assert page.count("<tbody") == 13 and page.count("DELIVERED_") >= 12


@pytest.mark.matrix
def test_500_pipelines_and_100_000_batches(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Bounded in what is read and drawn; how long it takes is printed."""
    source = {"format": "log", "path": str(tmp_path / "p000" / "in"), "startingOffsets": "earliest"}
    files = [written(tmp_path, f"p{n:03}", source=source) for n in range(500)]
    sent(files[0], [b"1"])
    for file in files[:20]:
        deliver(Pipeline.from_file(file))
    for batch in range(100_000):
        seconds = dict.fromkeys(("plan", "stage", "prepare", "decide", "apply"), 0.1)
        history.add(checkpoint(files[0]), BatchReport(batch, batch, {"rows": 9}, 1, 0, seconds, 9))
        sample = Sample(now_ms() - 500_000 + batch * 5, "source", {str(p): 1 for p in range(9)}, {"0": 1})
        history._append(checkpoint(files[0]), history.SAMPLES, sample.__dict__)
    own, figures = psutil.Process(), []
    with served(tmp_path, files) as site:
        for path in ("/", "/", "/", "/pipelines/p000", "/pipelines/p000?hours=24"):
            start, before = time.monotonic(), own.cpu_times().user
            code, page, _ = site.ask(path)
            took, cpu = time.monotonic() - start, own.cpu_times().user - before
            figures.append(f"{path}: {took:.2f} s, {cpu:.2f} s of CPU, {len(page) / 1024:,.0f} KiB")
            assert code == 200 and len(page) < 2_000_000
            if path == "/":
                waiting = re.findall(r", (\d+) not answered yet", page)
                figures[-1] += f", {waiting[0] if waiting else 0} not answered yet"
                assert page.count("<tbody") + int(waiting[0] if waiting else 0) == 500
        until(lambda: "not answered yet" not in site.ask("/")[1])
        figures.append(f"all answered; {own.memory_info().rss / 1048576:,.0f} MiB resident")
    with capsys.disabled():
        print("\n" + "\n".join(figures))
