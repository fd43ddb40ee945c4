"""`make site` builds every page with the locked Zensical."""

from __future__ import annotations

from docs.site import build


def test_the_site_builds_without_a_broken_link_and_asks_no_other_host() -> None:
    assert build() == []
