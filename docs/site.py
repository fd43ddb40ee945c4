"""`make site`: the documentation as one folder, `build/site`, which opens from disk and asks no other host.

Zensical builds what `stage` puts into `build/pages`: the pages of `docs/`, those of `ROOT_PAGES`, and every file that
they link.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path

import yaml
from docs import errors

ROOT = Path(__file__).parent.parent
PAGES, SITE = ROOT / "build" / "pages", ROOT / "build" / "site"
ROOT_PAGES = ("ARCHITECTURE.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md")
"""Pages outside docs/ that the site has, too."""
_UNSEARCHED = "---\nsearch: {exclude: true}\n---\n\n"
"""Front matter of pages that the site's search skips."""

_FENCE = re.compile(r"(^```.*?^```$)", re.MULTILINE | re.DOTALL)
_TARGET = re.compile(r'(?<=\]\()[^()\s]+(?=\))|(?<=src=")[^"]+(?=")|(?<=srcset=")[^"]+(?=")|(?<=href=")[^"]+(?=")')
_DIAGRAM = re.compile(r"^!\[([^\]]*)\]\((diagrams/[\w-]+)\.svg\)$", re.MULTILINE)
_BY_WIDTH = r'<picture><source media="(max-width: 44.9em)" srcset="\2-narrow.svg"><img alt="\1" src="\2.svg"></picture>'
"""A diagram of docs/diagrams.py, which has a drawing for narrow screens beside it -> the one that fits."""
_HOST = re.compile(r"[a-z]+:|//")


def pages() -> list[Path]:
    """Every page of the site, relative to the repository."""
    return [*sorted(p.relative_to(ROOT) for p in (ROOT / "docs").rglob("*.md")), *map(Path, ROOT_PAGES)]


def prose(text: str) -> Iterator[tuple[str, bool]]:
    """A page in parts: (text, whether it is outside of code blocks)."""
    for i, part in enumerate(_FENCE.split(text)):
        yield part, i % 2 == 0


def links(page: Path) -> list[str]:
    """Targets of a page's links and pictures, as written."""
    text = (ROOT / page).read_text(encoding="utf-8")
    return [m for part, is_prose in prose(text) if is_prose for m in _TARGET.findall(part)]


def is_external(target: str) -> bool:
    return _HOST.match(target) is not None


def linked(page: Path, target: str) -> tuple[Path, str]:
    """The file that a link means, relative to the repository, and its anchor."""
    path, _, anchor = target.partition("#")
    return (Path(os.path.normpath(page.parent / path)) if path else page), anchor


def place(file: Path) -> Path:
    """Where a file of the repository lies in the site: docs/ is its root, and code is in files/."""
    if file.parts[0] == "docs":
        return Path(*file.parts[1:])
    return Path(file.name.lower()) if str(file) in ROOT_PAGES else Path("files") / file


def is_searched(page: Path) -> bool:
    """Whether the site's search finds the page: what only contributors need would hide what users look for."""
    return "decisions" not in page.parts and page.name not in ("ARCHITECTURE.md", "CONTRIBUTING.md")


def staged(page: Path, text: str) -> str:
    """A page's text with its links as they are in the site."""

    def relative(match: re.Match[str]) -> str:
        if is_external(match[0]):
            return match[0]
        file, anchor = linked(page, match[0])
        return os.path.relpath(place(file), place(page).parent) + (f"#{anchor}" if anchor else "")

    text = _DIAGRAM.sub(_BY_WIDTH, text)
    text = "".join(_TARGET.sub(relative, part) if is_prose else part for part, is_prose in prose(text))
    return text if is_searched(page) else _UNSEARCHED + text


def decisions() -> str:
    """The index of docs/decisions; on GitHub, the folder itself is one."""
    what = "Each page records one decision: context, choice, measurements, cost. Read it before you change the design."
    lines = [_UNSEARCHED + "# Design decisions", "", what, ""]
    for page in sorted((ROOT / "docs" / "decisions").glob("*.md")):
        heading = page.read_text(encoding="utf-8").partition("\n")[0]
        lines.append(f"- [{heading.lstrip('# ')}]({page.name})")
    return "\n".join(lines) + "\n"


def stage() -> None:
    shutil.rmtree(PAGES, ignore_errors=True)
    wanted = pages()
    for page in wanted:
        out = PAGES / place(page)
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(staged(page, (ROOT / page).read_text(encoding="utf-8")), encoding="utf-8")
        for file in {linked(page, target)[0] for target in links(page) if not is_external(target)} - {*wanted}:
            (PAGES / place(file)).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(ROOT / file, PAGES / place(file))
    with (PAGES / "errors.md").open("a", encoding="utf-8") as page_of_errors:
        page_of_errors.write(errors.index())
    shutil.copytree(ROOT / "docs" / "diagrams", PAGES / "diagrams", dirs_exist_ok=True)
    (PAGES / "errors").mkdir()
    for name, text in errors.pages():  # not kept in docs/: they would change with every error
        (PAGES / name).write_text(text, encoding="utf-8")
    (PAGES / "decisions" / "index.md").write_text(decisions(), encoding="utf-8")
    for asset in ("iframe-worker.js", "site.css"):
        shutil.copyfile(ROOT / "docs" / asset, PAGES / asset)


def in_nav() -> list[str]:
    """Pages of `nav` in mkdocs.yml, as paths in the site."""
    config = yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))

    def leaves(node: object) -> Iterator[str]:
        if isinstance(node, str):
            yield node
        for child in node.values() if isinstance(node, dict) else node if isinstance(node, list) else ():
            yield from leaves(child)

    return list(leaves(config["nav"]))


class _Requests(HTMLParser):
    """What a browser loads by itself when it opens a page: not what the reader may click."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = dict(attrs)
        if tag != "a" and not (tag == "link" and values.get("rel") in ("canonical", "prev", "next")):
            self.found += [v for k, v in values.items() if v and k in ("src", "srcset", "href", "data", "poster")]


def problems(site: Path) -> list[str]:
    """Missing pages, and requests to other hosts, of a built site."""
    found = [f"{place(p)} was not built" for p in pages() if not (site / place(p).with_suffix(".html")).exists()]
    for file in sorted(site.rglob("*.html")):
        parser = _Requests()
        parser.feed(file.read_text(encoding="utf-8"))
        found += [
            f"{file.name} loads {url}" for url in parser.found if is_external(url) and not url.startswith("data:")
        ]
    for file in site.rglob("*.css"):
        found += [
            f"{file.name} loads {url}"
            for url in re.findall(r"(?:url\(|@import )[\"']?([^\"')]+)", file.read_text(encoding="utf-8"))
            if is_external(url) and not url.startswith("data:")
        ]
    if not (site / "search.js").exists():
        found.append("search.js was not built: no search without a server")
    return found


_CELL = re.compile(r"<td>(.*?)</td>", re.DOTALL)
_TEXT_LENGTH = 40


def mark_text(page: str) -> str:
    """Mark the cells of tables that hold sentences: site.css keeps them from one word a line on a narrow screen."""

    def marked(cell: re.Match[str]) -> str:
        long = len(re.sub(r"<[^>]*>", "", cell[1])) >= _TEXT_LENGTH
        return f'<td class="text">{cell[1]}</td>' if long else cell[0]

    return _CELL.sub(marked, page)


def build() -> list[str]:
    """Stage and build; returns what is wrong with the result."""
    stage()
    shutil.rmtree(SITE, ignore_errors=True)
    command = [sys.executable, "-m", "zensical", "build", "--clean", "--strict"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    shutil.rmtree(ROOT / ".cache", ignore_errors=True)  # Zensical's; its place cannot be chosen
    if done.returncode:
        return [done.stdout + done.stderr]
    for file in SITE.rglob("*.html"):
        file.write_text(mark_text(file.read_text(encoding="utf-8")), encoding="utf-8")
    return problems(SITE)


def main() -> int:
    found = build()
    for problem in found:
        sys.stderr.write(problem + "\n")
    if not found:
        sys.stdout.write(f"{len(pages())} pages: {SITE / 'index.html'}\n")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
