"""Generated pages are up to date."""

from __future__ import annotations

from docs.generate import pages


def test_generated_pages_are_up_to_date() -> None:
    stale = [page.name for page, text in pages().items() if not page.exists() or page.read_text() != text]
    assert not stale, f"{stale} are not up to date; run `make docs`"
