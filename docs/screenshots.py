"""`make screenshots`: pictures of the page, as the rehearsal kept it while a receiver was gone, in Chromium."""

from __future__ import annotations

import re
import socket
from pathlib import Path

from tools.chromium import browser

KEPT = Path("build") / "page-a-receiver-is-killed.html"
DOCS = Path(__file__).parent
PICTURES = {
    "page.png": ("light", 1100, 900),
    "page-dark.png": ("dark", 1100, 900),
    "page-phone.png": ("light", 390, 844),
}
"""Colour scheme, width, height."""


def neutral(text: str, host: str) -> str:
    """A page without the folder of the rehearsal and the name of the machine."""
    return re.sub(rf"\bon {re.escape(host)}\b", "on worker-1", re.sub(r"/[^\s<>\"']*/rehearsal-\w+/", "", text))


def main() -> None:
    if not KEPT.exists():
        raise SystemExit(f"{KEPT} is not there: run make rehearsal first")
    text = neutral(KEPT.read_text(encoding="utf-8"), socket.gethostname())
    with browser() as chromium:
        for name, (scheme, width, height) in PICTURES.items():
            tab = chromium.new_page(viewport={"width": width, "height": height}, color_scheme=scheme)
            tab.set_content(text)
            tab.screenshot(path=DOCS / name)


if __name__ == "__main__":
    main()
