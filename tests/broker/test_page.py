"""The page in a browser: light, dark, phone width, keyboard, no other host, no secret; the matrix and its timelines."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import uvicorn
import yaml
from confluent_kafka import Producer
from tools.chromium import browser as started

from delivered.connectors.kafka.topics import id_prefix
from delivered.operate.asking import status
from delivered.operate.server import application
from delivered.pipeline.definition import Definition
from delivered_lab.verify.evidence import End, Operation
from delivered_lab.verify.matrix import Store
from delivered_lab.verify.report import page as verified_page

DOCS = Path(__file__).parents[2] / "docs"
SECRET = "hunter2-is-a-secret"
CONTRAST = """() => {
  const light = c => { const [r, g, b] = c.match(/\\d+/g).slice(0, 3).map(v => v / 255)
    .map(v => v <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4); return 0.2126 * r + 0.7152 * g + 0.0722 * b };
  const behind = e => { for (; e; e = e.parentElement) { const c = getComputedStyle(e).backgroundColor;
    if (!c.endsWith(', 0)')) return c } return 'rgb(255, 255, 255)' };
  return [...document.querySelectorAll('h1, h2, h3, p, span, b, small, td, th, code, button, a, li')]
    .filter(e => e.textContent.trim() && getComputedStyle(e).opacity === '1').map(e => {
      const [a, b] = [light(getComputedStyle(e).color), light(behind(e))].sort((x, y) => y - x);
      return [(a + 0.05) / (b + 0.05), e.outerHTML.slice(0, 80)] }).sort((x, y) => x[0] - y[0])[0] }"""
"""The least contrast of a text with what is behind it."""


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with started() as one:
        yield one


@contextmanager
def served(app: Any) -> Iterator[str]:
    """Its address."""
    listener = socket.create_server(("127.0.0.1", 0))
    server = uvicorn.Server(uvicorn.Config(app, log_level="error"))
    thread = threading.Thread(target=server.run, args=([listener],))
    thread.start()
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join()


def written(folder: Path, name: str, sink: dict[str, Any]) -> Path:
    log = {"format": "log", "path": str(folder / "in")}
    made = {"pipeline": name, "guarantee": "exactly_once", "checkpoint": str(folder / name), "source": log}
    file = folder / f"{name}.yaml"
    file.write_text(yaml.safe_dump({**made, "sinks": [sink]}))
    return file


def test_a_transaction_is_aborted_by_keyboard(
    kafka: Any, browser: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PAGE_SECRET", SECRET)
    topic = kafka.topic(1)
    orders = written(
        tmp_path, "orders", {"format": "kafka", "kafka.bootstrap.servers": kafka.bootstrap, "topic": topic}
    )
    away = {
        "format": "postgres",
        "url": "postgresql://u@127.0.0.1:1/x",
        "password": "${env:PAGE_SECRET}",
        "dbtable": "t",
    }
    pipeline = Definition.from_file(orders)
    spec = pipeline.spec
    holder = Producer(
        {
            "bootstrap.servers": kafka.bootstrap,
            "transactional.id": f"{id_prefix(spec.scope(spec.open()))}7.0",
            "log_level": 0,
        }
    )
    holder.init_transactions(30)
    holder.begin_transaction()
    holder.produce(topic, b"never committed")
    holder.flush(30)
    hosts: set[str] = set()
    with served(application([orders, written(tmp_path, "away", away)])) as address:
        tab = browser.new_context(viewport={"width": 390, "height": 844}).new_page()
        tab.on("request", lambda request: hosts.add(urlsplit(request.url).netloc))
        shades = set()
        for page in ("/pipelines/orders?paused", "/?paused"):
            for scheme in ("light", "dark"):
                tab.emulate_media(color_scheme=scheme)
                tab.goto(f"{address}{page}")
                shades.add(tab.evaluate("getComputedStyle(document.body).backgroundColor"))
                contrast, where = tab.evaluate(CONTRAST)
                assert contrast >= 4.5, (scheme, where)  # WCAG 2.2, AA
            assert tab.evaluate("document.documentElement.scrollWidth") <= 390, "wider than a phone"
        assert len(shades) == 2
        said = tab.content()
        assert "DELIVERED_TRANSACTION_ORPHANED" in said and "DELIVERED_POSTGRES_UNREACHABLE" in said
        assert f"delivered transactions abort {orders}" in tab.inner_text("body"), "a command that runs as it is"
        assert SECRET not in said
        tab.click("a[href='/pipelines/orders']")
        assert SECRET not in tab.content()
        for _ in range(30):
            tab.keyboard.press("Tab")
            if tab.evaluate("document.activeElement.tagName") == "BUTTON":
                break
        assert tab.evaluate("document.activeElement.innerText") == "abort"
        assert tab.evaluate("getComputedStyle(document.activeElement).outlineStyle") == "solid", "focus is visible"
        with tab.expect_navigation(url=f"{address}/pipelines/orders"):
            tab.keyboard.press("Enter")
        assert tab.query_selector("button") is None
        tab.context.close()
    assert hosts == {urlsplit(address).netloc}
    assert status(pipeline).transactions == ()


def test_the_matrix_leads_to_a_timeline_and_the_token_stays_out_of_pages(browser: Any, tmp_path: Path) -> None:
    """Without the token there is nothing; a browser that brought it has it in a cookie, and in no page or address."""
    history = [
        Operation(0.0, "driver 1", "run", End.STARTED, {}),
        Operation(1.0, "fault", "SIGKILL of the driver", End.OK, {}),
        Operation(1.1, "driver 1", "run", End.UNKNOWN, {}),
        Operation(2.0, "reader", "read", End.OK, {"all": 12}),
    ]
    (tmp_path / "history.jsonl").write_text("\n".join(o.to_json() for o in history))
    results = Store(DOCS / "verified.json")
    results.load()
    some = [r for r in results.results.values() if r.fault == "killed-twice"][:12]
    some = [replace(some[0], folder=str(tmp_path)), *some[1:]]
    app = application([], token="s3cret-token-16-or-more", address="0.0.0.0", verified=lambda: verified_page(some))
    with served(app) as address:
        tab = browser.new_context().new_page()
        assert tab.goto(f"{address}/verified").status == 401
        assert tab.goto(f"{address}/?token=wrong").status == 401
        tab.goto(f"{address}/?token=s3cret-token-16-or-more")
        assert tab.url == f"{address}/" and "s3cret-token-16-or-more" not in tab.content()
        tab.click("text=verified")
        tab.click(f"a[href$='{some[0].workload}-{some[0].fault}']")
        assert tab.locator("svg[role=img]").is_visible(), "the case opened"
        assert "12 effects seen" in tab.locator("svg[role=img]").inner_html()
        tab.context.close()
