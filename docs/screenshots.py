"""`make screenshots`: pictures of the page in Chromium: as the rehearsal kept it while a receiver was gone, and of a
pipeline whose seals tell what happened to its records."""

from __future__ import annotations

import re
import socket
import tempfile
from dataclasses import replace
from pathlib import Path

from tests.support.orders import Orders
from tools.chromium import browser

from delivered.operate.asking import status
from delivered.operate.page import flow_of, page
from delivered.operate.status import Driver

KEPT = Path("build") / "page-a-receiver-is-killed.html"
DOCS = Path(__file__).parent
PICTURES = {
    "page.png": ("light", 1100, 900),
    "page-dark.png": ("dark", 1100, 900),
    "page-phone.png": ("light", 390, 844),
}
SEALS = {
    "page-seals.png": ("light", 1440, 880),
    "page-seals-dark.png": ("dark", 1440, 880),
    "page-seals-phone.png": ("light", 390, 1500),
}
"""Colour scheme, width, height."""


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


def neutral(text: str, host: str) -> str:
    """A page without the folder of the rehearsal and the name of the machine."""
    return re.sub(rf"\bon {re.escape(host)}\b", "on worker-1", re.sub(r"/[^\s<>\"']*/rehearsal-\w+/", "", text))


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        shown = [(SEALS, sealed(Path(folder)))]
    if KEPT.exists():  # of `make rehearsal`
        shown.append((PICTURES, neutral(KEPT.read_text(encoding="utf-8"), socket.gethostname())))
    with browser() as chromium:
        for pictures, text in shown:
            for name, (scheme, width, height) in pictures.items():
                tab = chromium.new_page(viewport={"width": width, "height": height}, color_scheme=scheme)
                tab.set_content(text)
                tab.screenshot(path=DOCS / name)


if __name__ == "__main__":
    main()
