"""`make site` builds every page with the locked Zensical; in a browser, from disk, its search finds them."""

from __future__ import annotations

import pytest
from docs.site import SITE, build
from tools.chromium import browser

_FIRST = {
    "transform": "transforms",
    "sqlite": "connectors/sqlite",
    "pipeline file": "pipeline-file",
    "python api": "python",
    "spark 3.5": "spark-versions",
    "troubleshooting": "troubleshooting",
    "dead letter": "dead-letters",
}
"""What a reader searches for -> the page that must come first."""


@pytest.mark.matrix
def test_the_site_builds_and_its_search_works_from_disk_without_another_host() -> None:
    assert build() == []
    with browser() as chromium:
        page = chromium.new_page(viewport={"width": 390, "height": 800})
        requests: list[str] = []
        page.on("request", lambda request: requests.append(request.url))
        page.goto((SITE / "index.html").as_uri())
        assert page.evaluate("document.documentElement.scrollWidth") <= 390, "a phone scrolls the page sideways"
        search = page.locator("input[aria-label='Search']")
        search.wait_for(state="attached")
        page.keyboard.press("Control+k")
        search.fill("LEDGER_AHEAD")
        found = page.locator("a[href$='#delivered_ledger_ahead']").first
        found.wait_for()
        found.click()
        page.wait_for_url("**/errors/batches.html*")
        assert page.locator("h1").inner_text().startswith("Errors: Batches")
        page.goto((SITE / "index.html").as_uri())
        search.wait_for(state="attached")
        page.keyboard.press("Control+k")
        for words, first in _FIRST.items():
            search.fill(words)
            page.locator(f"a[href*='.html?h={words.replace(' ', '+')}']").first.wait_for()
            found = page.locator("a[href*='.html?h=']").first.get_attribute("href") or ""
            assert found.partition(".html")[0].endswith(f"/site/{first}"), (words, found)
    assert {url.partition(":")[0] for url in requests} <= {"file", "data", "blob", "about"}
