"""Pages of the site: each is in the navigation, and every link leads somewhere."""

from __future__ import annotations

import re
from collections import Counter
from functools import cache
from pathlib import Path

from docs import facts
from docs.site import ROOT, in_nav, is_external, linked, links, pages, place, problems, prose

from delivered.model.errors import entries

_HEADING = re.compile(r"^#+ (.*)$", re.MULTILINE)
_LINKED_PAGES = [*pages(), Path("README.md")]


@cache
def _anchors(page: Path) -> frozenset[str]:
    """Anchors of the headings as GitHub makes them; Zensical checks its own when it builds the site."""
    text = "".join(part for part, is_prose in prose((ROOT / page).read_text(encoding="utf-8")) if is_prose)
    headings = [re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", h) for h in _HEADING.findall(text)]
    return frozenset(re.sub(r"[^\w\- ]", "", h.strip().lower()).replace(" ", "-") for h in headings)


def _broken(page: Path, target: str) -> bool:
    file, anchor = linked(page, target)
    if not (ROOT / file).is_file():
        return not (page.name == "README.md" and (ROOT / file).is_dir())  # GitHub shows folders, the site has none
    return bool(anchor) and file.suffix == ".md" and anchor not in _anchors(file)


def test_every_page_is_in_the_navigation_once() -> None:
    expected = [str(place(p)) for p in pages() if p.parent.name != "decisions"]
    assert Counter(in_nav()) == Counter([*expected, "decisions/index.md"]), "add a line to nav in mkdocs.yml"


def test_links_of_error_codes_lead_somewhere() -> None:
    assert [e["docs"] for e in entries().values() if "docs" in e and _broken(Path("docs/errors.md"), e["docs"])] == []


def test_links_say_where_they_lead() -> None:
    texts = [
        f"{page}: [{found}]"
        for page in _LINKED_PAGES
        for found in re.findall(r"\[([^\[\]]*)\]\(", (ROOT / page).read_text(encoding="utf-8"))
        if re.fullmatch(r"\d*|here|this|link|[\w-]+\.md", found) and page.name != "CHANGELOG.md"
    ]
    assert texts == []


def test_links_lead_somewhere() -> None:
    broken = [
        f"{page}: {target}"
        for page in _LINKED_PAGES
        for target in links(page)
        if not is_external(target) and _broken(page, target)
    ]
    assert not broken


def test_a_request_to_another_host_is_found(tmp_path: Path) -> None:
    for page in pages():
        out = (tmp_path / place(page)).with_suffix(".html")
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(
            '<a href="https://example.org">x</a><link href="site.css"><img src="data:image/png;base64,AA==">'
        )
    (tmp_path / "search.js").touch()
    assert problems(tmp_path) == []
    (tmp_path / "index.html").write_text('<link rel="stylesheet" href="https://fonts.example.org/a.css">')
    (tmp_path / "a.css").write_text("a { background: url('//cdn.example.org/b.png') }")
    (tmp_path / "audit.html").unlink()
    (tmp_path / "search.js").unlink()
    assert problems(tmp_path) == [
        "audit.md was not built",
        "index.html loads https://fonts.example.org/a.css",
        "a.css loads //cdn.example.org/b.png",
        "search.js was not built: no search without a server",
    ]


def test_a_connectors_page_has_every_section() -> None:
    """Install, formats, guarantees and versions are in the table at its head; each page has the same sections."""
    assert {p.stem for p in facts.FOLDER.glob("*.md")} - set(facts.PAGES) == {"kafka-logins", "kafka-parity", "upserts"}
    for name in facts.PAGES:
        text = (facts.FOLDER / f"{name}.md").read_text(encoding="utf-8")
        assert facts.BEGIN in text, name
        found = [h for h in re.findall(r"^## (.*)$", text, re.MULTILINE) if h in facts.HEADINGS]
        assert tuple(found) == facts.HEADINGS, name
