"""Generated pages are up to date."""

from __future__ import annotations

import re
from itertools import pairwise

import pytest
from docs import errors, notebook, screenshots
from docs.generate import pages
from docs.site import ROOT, is_searched, prose
from docs.site import pages as pages_of_site
from hatch_build import with_absolute_links


def test_generated_pages_are_up_to_date() -> None:
    stale = [page.name for page, text in pages().items() if not page.exists() or page.read_text() != text]
    assert not stale, f"{stale} are not up to date; run `make docs`"


def test_every_page_begins_with_what_it_is() -> None:
    """A sentence, before code, tables, pictures and headings."""
    for page in (*(ROOT / "docs").glob("*.md"), *(ROOT / "docs" / "connectors").glob("*.md")):
        text = re.sub(r"\A---\n.*?\n---\n", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
        title, _, rest = text.strip().partition("\n")
        first = rest.strip()
        assert re.match(r"# \w", title), page.name
        assert re.match(r"(?!Generated|Written|Measured)[\w`*[]", first) and not first.startswith("```"), page.name


_WORDS = {
    r"\bwe\b|\bours\b": "the name of the thing: `delivered`, the sink, the driver",
    r"\bby hand\b": "manually",
    r"\bgo(es)? on\b": "continue",
    r"\bneeds you\b": "needs attention",
    r"\bway out\b": "next step, solution",
    r"\bleft out\b": "skipped, dropped",
    r"\b(busy|quiet) (cores|machine)\b": "the cores; how busy a machine was says nothing",
    r"\bmend(s|ed)?\b": "fix",
    r"\banew\b": "again",
    r"\bPosixPath\b": "the path",
}
"""What pages for users do not say -> what they say instead."""


def test_pages_use_the_words_of_the_field() -> None:
    found = []
    written = [
        (page, (ROOT / page).read_text(encoding="utf-8"))
        for page in pages_of_site()
        if is_searched(page) and page.name not in ("CHANGELOG.md", "SECURITY.md", "types.md")  # "ours": a name tried
    ]
    for page, whole in [*written, *errors.pages()]:
        text = "".join(part for part, is_prose in prose(whole) if is_prose)
        text = re.sub(r"`[^`]*`|\]\([^)]*\)", "", text)
        for pattern, instead in _WORDS.items():
            found += [f"{page}: {m[0]!r}, write: {instead}" for m in re.finditer(pattern, text, re.IGNORECASE)]
    assert found == []


_TAGS = {"a", "br", "div", "img", "picture", "source"}


def test_placeholders_are_no_html() -> None:
    """A browser would drop `<topic>` outside of code; and a bar in a cell would begin another."""
    found = []
    for page in pages_of_site():
        text = "".join(part for part, is_prose in prose((ROOT / page).read_text(encoding="utf-8")) if is_prose)
        outside = re.sub(r"``.*?``|`[^`]*`|<!--.*?-->", "", text, flags=re.DOTALL)
        found += [f"{page}: {m[0]}" for m in re.finditer(r"</?(\w+)[^>\n]*>", outside) if m[1] not in _TAGS]
        bars = [(line, len(re.findall(r"(?<!\\)\|", line))) for line in text.splitlines()]
        found += [
            f"{page}: {line}"
            for (above, expected), (line, count) in pairwise(bars)
            if above.startswith("|") and line.startswith("|") and count != expected
        ]
    assert found == []


def test_what_belongs_to_an_item_is_indented_by_four() -> None:
    """GitHub takes two or three columns; the site would end the list, and number the next item 1."""
    loose = [
        f"{page}: {line}"
        for page in pages_of_site()
        for above, line in pairwise((ROOT / page).read_text(encoding="utf-8").splitlines())
        if not above.strip() and re.match(r" {1,3}\S", line)
    ]
    assert loose == []


_WORDS_MAX = 110


def test_no_paragraph_is_a_wall() -> None:
    walls = []
    for page in pages_of_site():
        if not is_searched(page) or page.name in ("CHANGELOG.md", "SECURITY.md"):
            continue
        text = "".join(part for part, is_prose in prose((ROOT / page).read_text(encoding="utf-8")) if is_prose)
        for paragraph in re.split(r"\n\s*\n|\n(?=\s*(?:[-*]|\d+\.) )", text):
            words = len(paragraph.split())
            if words > _WORDS_MAX and not paragraph.lstrip().startswith(("|", "<!--")):
                walls.append(f"{page}, {words} words: {paragraph.strip()[:60]}")
    assert walls == []


_GENERATED = {"benchmark", "cli", "peers", "python", "spark-versions", "support", "types", "verified"}
_COLUMNS_MAX = 142


def test_prose_is_wrapped() -> None:
    """So that a changed word changes a line or two. Tables and what generators write have lines of any length."""
    long = []
    for page in pages_of_site():
        if page.stem in _GENERATED or page.name == "CHANGELOG.md" or "decisions" in page.parts:
            continue
        text = re.sub(r"<!-- [^>]*generated.*?<!-- /", "", (ROOT / page).read_text(encoding="utf-8"), flags=re.DOTALL)
        lines = "".join(part for part, is_prose in prose(text) if is_prose).splitlines()
        long += [f"{page}: {line}" for line in lines if len(line) > _COLUMNS_MAX and not line.lstrip().startswith("|")]
    assert long == []


def test_links_of_readme_lead_somewhere_on_a_package_index() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    target = re.compile(r"\]\(([^)]*)\)")
    at_source = with_absolute_links(readme, "https://example.org/delivered")
    assert [t for t in target.findall(at_source) if not t.startswith("https://")] == []
    assert len(target.findall(at_source)) == len(target.findall(readme))
    assert "![A batch" in at_source
    assert "(https://example.org/delivered/raw/HEAD/docs/protocol.svg)" in at_source
    assert "[Tutorial](https://example.org/delivered/blob/HEAD/docs/tutorial.md)" in at_source
    nowhere = with_absolute_links(readme, "")
    assert [t for t in target.findall(nowhere) if not t.startswith("https://")] == []
    assert "Tutorial · What a guarantee means" in nowhere


def test_the_notebook_tells_the_tutorial() -> None:
    page = notebook.PAGE.read_text(encoding="utf-8")
    told = [source for kind, source in notebook.cells(page) if kind == "markdown"]
    for paragraph in re.sub(r"```sh\n.*?```\n", "\n\n", page, flags=re.DOTALL).split("\n\n"):
        lines = [line for line in paragraph.strip().splitlines() if "tutorial.ipynb" not in line]
        assert any("\n".join(lines) in text for text in told), paragraph
    with pytest.raises(ValueError, match=r"has commands in .*'6\. More'"):
        notebook.cells(f"{page}\n## 6. More\n\n```sh\nls\n```\n")
    with pytest.raises(ValueError, match="2 blocks of commands"):
        notebook.cells(page.replace("## 4. Start it again, and count\n", ""))


def test_pictures_name_no_folder_and_no_machine() -> None:
    for page in ("process 7 on vm was not stopped", "delivered receive /t/shots-2k1_b/clean.yaml"):
        assert screenshots.is_private(page, "vm", "/t/shots-2k1_b")
    assert not screenshots.is_private("process 7 on worker-1, vms, /t/other", "vm", "/t/shots-2k1_b")
