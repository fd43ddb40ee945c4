"""How every page, and every object in a notebook, looks: light and dark, phone width, no script, nothing from another
host.

A page is a Jinja template in a frame (`page`). An object in a notebook is a `fragment`, which needs no other package:
its style applies inside it alone, and follows the notebook's theme (JupyterLab, VS Code, Colab) before the browser's.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from functools import lru_cache
from html import escape
from typing import TYPE_CHECKING, Any

from delivered.model.errors import extra, plain

if TYPE_CHECKING:
    from jinja2 import Template
    from rich.console import Group

SIGNS = {"held": "●", "broken": "✕", "invalid": "▲", "unknown": "?"}
"""Shapes of verdicts, so that colour is not the only sign."""

_LIGHT = """color: #1c1e21; background: #fff; --ink: #1c1e21; --page: #fff; --line: #d5d9df; --soft: #5b616b;
  --panel: #f5f6f8; --held: #00684a; --broken: #a83f00; --invalid: #6a3d9a; --unknown: #7a5c00; --bar: #0072b2;
  --seen: #009e73;"""
_DARK = """color: #e8e8ea; background: #16181c; --ink: #e8e8ea; --page: #16181c; --line: #3a3f47; --soft: #a6adb8;
  --panel: #1f2228; --held: #4fd1a5; --broken: #ff9a63; --invalid: #cbb2ff; --unknown: #f0c04a; --bar: #56b4e9;
  --seen: #4fd1a5;"""

_RULES = """
  .soft { color: var(--soft); } .scroll { overflow-x: auto; } h3 { font-size: 1rem; margin: 1rem 0 .3rem; }
  table { border-collapse: collapse; } th, td { padding: .3rem .7rem; border-bottom: 1px solid var(--line);
    text-align: left; vertical-align: top; } th { font-weight: 600; } td.number, th.number { text-align: right;
    font-variant-numeric: tabular-nums; } td small, th small { color: var(--soft); font-weight: 400; display: block; }
  .held { color: var(--held); } .broken { color: var(--broken); } .invalid { color: var(--invalid); }
  .unknown { color: var(--unknown); } b.broken, b.invalid { text-decoration: underline; }
  code { font-size: .85rem; overflow-wrap: anywhere; }
  .figures { display: flex; flex-wrap: wrap; gap: .4rem 1.6rem; margin: .6rem 0; padding: 0; list-style: none; }
  .figures b { font-variant-numeric: tabular-nums; } .figures span { color: var(--soft); display: block;
    font-size: .85rem; }
  .problem { border-left: .25rem solid var(--broken); background: var(--panel); padding: .4rem .8rem; margin: .4rem 0; }
  .flow { display: grid; grid-template-columns: 1fr auto 1fr; align-items: center; gap: .6rem 0; margin: .8rem 0; }
  .flow ul { list-style: none; margin: 0; padding: 0; display: grid; gap: .5rem; } .flow small { color: var(--soft); }
  .flow li { display: grid; grid-template-columns: auto minmax(7rem, 1fr); align-items: center; }
  .flow li b, .flow .hub { border: 1px solid var(--line); border-radius: .3rem; padding: .2rem .6rem;
    font-weight: 500; }
  .flow li small { border-bottom: 2px solid var(--line); padding: 0 .5rem; text-align: center; position: relative;
    line-height: 1.3; } .flow li small::after { content: "\\25B6"; position: absolute; right: -.1rem; bottom: -.62rem;
    font-size: .7rem; }
  .flow ul:last-child li { grid-template-columns: minmax(7rem, 1fr) auto; } .flow ul:last-child li b { order: 2; }
  .flow .hub { background: var(--panel); text-align: center; max-width: 16rem; } .flow .hub small { display: block; }
  @media (max-width: 44rem) { .flow { grid-template-columns: 1fr; } .flow .hub { max-width: none; }
    .flow li { grid-template-columns: 1fr; } .flow li small { border: 0; padding: .1rem .5rem; }
    .flow li small::after { content: "\\25BC"; position: static; padding-left: .4rem; }
    .flow ul:last-child li { display: flex; flex-direction: column; align-items: stretch; } }
"""
_PAGE = f"""
  :root {{ color-scheme: light dark; }} body {{ {_LIGHT} }}
  @media (prefers-color-scheme: dark) {{ body {{ {_DARK} }} }}
  body {{ font: 16px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 72rem; padding: 0 1rem; }}
{_RULES}
  h1 {{ margin-bottom: 0; }} p.made {{ color: var(--soft); margin-top: .2rem; }} a {{ color: var(--bar); }}
  td.square {{ white-space: nowrap; }} tr > th:first-child {{ min-width: 12rem; }} td.asked {{ min-width: 16rem; }}
  details {{ border-bottom: 1px solid var(--line); padding: .35rem 0; }} summary {{ cursor: pointer; }}
  details > div {{ background: var(--panel); padding: .7rem 1rem; margin: .4rem 0; border-radius: .4rem; }}
  svg {{ width: 100%; height: auto; }} svg text {{ font: 10px system-ui, sans-serif; fill: var(--ink); }}
  svg text.tick {{ fill: var(--soft); }} svg text.run {{ fill: var(--page); font-size: 8px; }}
  svg text.fault {{ fill: var(--broken); font-size: 8px; }} svg line.rail {{ stroke: var(--line); }}
  svg line.fault {{ stroke: var(--broken); stroke-dasharray: 3 2; }} svg rect.run {{ fill: var(--bar); }}
  svg rect.killed {{ fill: var(--broken); }} svg rect.failed {{ fill: var(--unknown); }}
  svg circle.send {{ fill: var(--soft); }} svg path.seen {{ fill: none; stroke: var(--seen); stroke-width: 1.5; }}
"""
_FRAGMENT = f"""
  .delivered {{ {_LIGHT} font: 14px/1.5 system-ui, sans-serif; padding: .6rem .8rem; }}
  @media (prefers-color-scheme: dark) {{ .delivered {{ {_DARK} }} }}
  [data-jp-theme-light="true"] .delivered, .vscode-light .delivered, html[theme="light"] .delivered {{ {_LIGHT} }}
  [data-jp-theme-light="false"] .delivered, .vscode-dark .delivered, html[theme="dark"] .delivered {{ {_DARK} }}
  .delivered {{ tr {{ background: none !important; }} td, th {{ white-space: normal; max-width: 50rem; }}
    p {{ margin: .3rem 0; }} ul {{ margin: 0; padding-left: 1rem; }} {_RULES}
    td:first-child code {{ white-space: nowrap; }} }}
"""


class Html(str):
    """Text that is HTML already: neither `table` nor a Jinja template escapes it."""

    def __html__(self) -> str:
        return self


def text(value: object) -> Html:
    """Escaped, control characters too, unless it is HTML already."""
    return value if isinstance(value, Html) else Html(escape(plain(str(value))))


def _escaped(value: Any) -> Any:
    return plain(value) if isinstance(value, str) and not hasattr(value, "__html__") else value


def utc(ms: int) -> str:
    """Milliseconds since 1970, as a reader wants them."""
    return datetime.fromtimestamp(ms / 1000, UTC).strftime("%Y-%m-%d %H:%M:%S")


def element(tag: str, content: object, css: str = "") -> Html:
    named = f' class="{css}"' if css else ""
    return Html(f"<{tag}{named}>{text(content)}</{tag}>")


def joined(parts: Iterable[object]) -> Html:
    return Html("".join(text(p) for p in parts))


def bullets(lines: Sequence[object]) -> Html:
    """A list; of one line, the line."""
    return text(lines[0]) if len(lines) == 1 else element("ul", joined(element("li", line) for line in lines))


def table(head: Sequence[str], rows: Iterable[Sequence[object]], numbers: Sequence[int] = ()) -> Html:
    """
    Args:
        head: empty: the first cell of each row is its heading.
        numbers: columns that are aligned right.
    """

    def row(tags: Iterable[str], cells: Sequence[object]) -> Html:
        columns = enumerate(zip(tags, cells, strict=True))
        return element("tr", joined(element(tag, c, "number" * (i in numbers)) for i, (tag, c) in columns))

    lines = [row(["th"] * len(head), head)] * bool(head)
    lines += [row(["td" if head or i else "th" for i in range(len(cells))], cells) for cells in rows]
    return element("div", element("table", joined(lines)), "scroll")


def figures(pairs: Iterable[tuple[str, object]]) -> Html:
    """Names and values, side by side."""
    items = (element("li", joined((element("span", name), element("b", value)))) for name, value in pairs)
    return element("ul", joined(items), "figures")


def problem(code: str, what: str, next_step: str | None) -> Html:
    parts: list[object] = [element("b", code, "broken"), " ", what]
    if next_step:
        parts += [Html("<br>Next: "), element("code", next_step)]
    return element("div", joined(parts), "problem")


def flow(sources: Sequence[tuple[str, str]], hub: tuple[str, str], sinks: Sequence[tuple[str, str]]) -> Html:
    """How the data travels: name and mechanism of each source, of the pipeline, and of each sink."""

    def named(name: str, how: str) -> Html:
        return joined((element("b", name), element("small", how)))

    ends = [element("ul", joined(element("li", named(*end)) for end in of)) for of in (sources, sinks)]
    return element("div", joined((ends[0], element("div", named(*hub), "hub"), ends[1])), "flow")


def from_rich(printed: Group) -> Html:
    """What the command line prints, in its words: `bold red` there is a broken verdict here, and so on."""
    return joined(_from_rich(part) for part in printed.renderables)


def _from_rich(part: Any) -> Html:
    if not hasattr(part, "columns"):
        return element("p", _styled(part))
    numbers = [i for i, c in enumerate(part.columns) if c.justify == "right"]
    rows = [*zip(*(map(_styled, c.cells) for c in part.columns), strict=True)]
    if part.show_footer:
        rows.append(tuple(text(c.footer) for c in part.columns))
    return joined((element("h3", part.title or ""), table([str(c.header) for c in part.columns], rows, numbers)))


_CLASSES = {"green": "held", "red": "broken", "yellow": "unknown", "dim": "soft"}


def _styled(part: Any) -> Html:
    """A Text of rich with its styles as classes; line breaks stay."""
    spans = sorted(getattr(part, "spans", ()), key=lambda s: s.start)
    words, done, parts = str(part), 0, list[object]()
    for span in spans:
        css = next((c for word, c in _CLASSES.items() if word in str(span.style).split()), "")
        content = words[span.start : span.end]
        parts += [words[done : span.start], element("b" if "bold" in str(span.style) else "span", content, css)]
        done = span.end
    css = next((c for word, c in _CLASSES.items() if word in str(getattr(part, "style", "")).split()), "")
    styled = Html(joined([*parts, words[done:]]).replace("\n", "<br>"))
    return element("span", styled, css) if css else styled


def fragment(*parts: object) -> str:
    """An object's HTML in a notebook, with its style."""
    return f'<div class="delivered"><style>{_FRAGMENT}</style>{joined(parts)}</div>'


_HEAD = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
{% if refresh_s %}<meta http-equiv="refresh" content="{{ refresh_s }}">{% endif %}
<title>{{ title }}</title>
<style>{{ style | safe }}</style>
</head>
<body>
<h1>{{ title }}</h1>
"""
_TAIL = """</body>
</html>
"""


def page(title: str, body: str, *, more_style: str = "", refresh_s: float | None = None, **values: Any) -> str:
    """A complete file.

    Args:
        body: a Jinja template; `signs` maps verdicts to symbols.
        refresh_s: a browser loads the page again after this long.

    Raises:
        MissingExtra: the extra `report` is not installed.
    """
    return part(_HEAD + body + _TAIL, title=title, style=_PAGE + more_style, refresh_s=refresh_s, **values)


def part(body: str, **values: Any) -> Html:
    """Part of a page. Arguments and errors as for `page`."""
    return Html(_template(body).render(signs=SIGNS, **values))


@lru_cache(32)
def _template(body: str) -> Template:
    with extra("report"):
        import jinja2
    return jinja2.Environment(autoescape=True, finalize=_escaped).from_string(body)
