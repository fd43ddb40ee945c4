"""`make screenshots`: pictures of the pages in Chromium, served from real checkpoints; an hour of history is written
beside them. And of a pipeline whose seals tell what happened to its records."""

from __future__ import annotations

import os
import re
import socket
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import uvicorn
from tests.support import watched
from tests.support.orders import Orders
from tests.support.without_spark import deliver
from tools.chromium import browser

from delivered import Pipeline
from delivered.checkpoint.history import add_audit
from delivered.operate.asking import status
from delivered.operate.page import flow_of, page
from delivered.operate.server import application
from delivered.operate.status import Driver

DOCS = Path(__file__).parent
SHOWN = {
    "page": "/?paused",
    "page-orders": "/pipelines/orders?paused",
    "page-letters": "/pipelines/orders/dead-letters",
}
"""Picture, without what tells its kind, and address."""
KINDS = {"": ("light", 1280), "-dark": ("dark", 1280), "-phone": ("light", 390), "-phone-dark": ("dark", 390)}
SEALS = {
    "page-seals.png": ("light", 1280, 1000),
    "page-seals-dark.png": ("dark", 1280, 1000),
    "page-seals-phone.png": ("light", 390, 1500),
}
"""Colour scheme, width, height."""
HOUR_MS = 3_600_000


def shop(folder: Path) -> list[Path]:
    """Pipelines of a shop: one has dead letters, one failed, one falls behind, and two are well."""
    now = watched.now_ms()
    values = [b"%d" % n for n in range(900)] + [b"12,50", b"<none>", b"99 EUR"]
    orders = watched.with_dead_letters(folder, "orders", values)
    watched.batches_of(orders, 70, now_ms=now, slow={31: 14.2})
    watched.run(orders, now - 30 * HOUR_MS, now - 9 * HOUR_MS, 15_110, "DELIVERED_KAFKA_UNREACHABLE",
                message="No broker of kafka-1:9092, kafka-2:9092 answered within 300 s.",
                next_step="delivered doctor orders.yaml")  # fmt: skip
    watched.run(orders, now - 9 * HOUR_MS + 4_000, now - 4 * HOUR_MS, 18_714)
    watched.run(orders, now - 4 * HOUR_MS, None, None)
    payments = watched.written(folder, "payments")
    watched.sent(payments, [b"1"] * 600)
    watched.deliver_and_end(payments)
    watched.sent(payments, [b"2"] * 880)
    at = watched.now_ms()
    watched.run(payments, at - 3 * HOUR_MS, at, 2_104, "DELIVERED_POSTGRES_UNREACHABLE",
                message='connection to server at "db-1", port 5432 failed: Connection refused',
                next_step="start the server, then: delivered run payments.yaml")  # fmt: skip
    clicks, sessions, invoices = (watched.written(folder, name) for name in ("clicks", "sessions", "invoices"))
    for file in (sessions, invoices, clicks):
        watched.sent(file, [b"1"] * 300)
        deliver(Pipeline.from_file(file))
        watched.run(file, now - 26 * HOUR_MS, None, None)
        watched.batches_of(file, 40, now_ms=now)
        audit = {"sink": "rows", "seconds": 1, "verdict": "held", "breaches": [], "unknowns": []}
        counts = {"sent": 300, "delivered": 300, "lost": 0, "duplicated": 0}
        add_audit(watched.checkpoint(file), audit | {"at_ms": now - 2 * HOUR_MS, "counts": counts})
    watched.sent(clicks, [b"2"] * 12_600)
    now = watched.now_ms()
    watched.an_hour(orders, {"orders-0": 130, "orders-1": 90, "orders-2": 40}, now_ms=now, burst=52_000)
    watched.an_hour(clicks, {"clicks-0": 300, "clicks-1": 310}, now_ms=now, behind=70)
    for file in (sessions, invoices):
        watched.an_hour(file, {"0": 21, "1": 24}, now_ms=now)
    return [orders, payments, clicks, sessions, invoices]


@contextmanager
def served(files: list[Path]) -> Iterator[str]:
    """Its address."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        server = uvicorn.Server(uvicorn.Config(application(files), log_level="error"))
        thread = threading.Thread(target=server.run, args=([listener],))
        thread.start()
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            server.should_exit = True
            thread.join()


def sealed(folder: Path) -> str:
    """The page of a pipeline that was audited after every few batches, while its table and its source were damaged."""
    orders = Orders(folder)

    def delivered(batches: int, *damage: str) -> None:
        orders.run(batches)
        if damage:
            orders.sql(*damage)
        orders.pipeline().audit()

    delivered(3)
    delivered(4)
    delivered(2, "INSERT INTO orders SELECT * FROM orders WHERE value = CAST('170' AS BLOB)")
    delivered(3)
    orders.run(3)
    orders.drop(13)
    delivered(1)
    delivered(3)
    delivered(4)
    orders.run(2)
    pipeline = orders.pipeline()
    shown = replace(status(pipeline), driver=Driver.RUNNING)
    return page([(shown, flow_of(pipeline))])


def is_private(text: str, host: str, folder: str) -> bool:
    """Whether a page names this machine or a folder of it."""
    return folder in text or re.search(rf"\bon {re.escape(host)}\b", text) is not None


def main() -> None:
    with tempfile.TemporaryDirectory() as folder, browser() as chromium:
        text = sealed(Path(folder))
        for name, (scheme, width, height) in SEALS.items():
            tab = chromium.new_page(viewport={"width": width, "height": height}, color_scheme=scheme)
            tab.set_content(text)
            tab.locator("section").evaluate("section => section.scrollIntoView()")
            tab.screenshot(path=DOCS / name)
        os.chdir(folder)  # paths on the pages are short
        Path("shop").mkdir()
        with watched.importable(Path("shop")), served(shop(Path("shop"))) as address:
            for name, path in SHOWN.items():
                for kind, (scheme, width) in KINDS.items():
                    tab = chromium.new_page(viewport={"width": width, "height": 400}, color_scheme=scheme)
                    tab.goto(address + path)
                    if is_private(tab.content(), socket.gethostname(), folder):
                        raise SystemExit(f"{path} names this machine or {folder}")
                    tab.screenshot(path=DOCS / f"{name}{kind}.png", full_page=True)


if __name__ == "__main__":
    main()
