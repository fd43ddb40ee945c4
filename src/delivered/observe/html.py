"""Frame and style of every page: light and dark, phone width, no script, nothing from another host."""

from __future__ import annotations

from typing import Any

from delivered.model.errors import MissingExtra

SIGNS = {"held": "●", "broken": "✕", "invalid": "▲", "unknown": "?"}
"""Shapes of verdicts, beside their colours."""

STYLE = """
  :root { color-scheme: light dark; --ink: #1c1e21; --page: #fff; --line: #d5d9df; --soft: #5b616b; --panel: #f5f6f8;
    --held: #00684a; --broken: #a83f00; --invalid: #6a3d9a; --unknown: #7a5c00; --bar: #0072b2; --seen: #009e73; }
  @media (prefers-color-scheme: dark) { :root { --ink: #e8e8ea; --page: #16181c; --line: #3a3f47; --soft: #a6adb8;
    --panel: #1f2228; --held: #4fd1a5; --broken: #ff9a63; --invalid: #cbb2ff; --unknown: #f0c04a; --bar: #56b4e9;
    --seen: #4fd1a5; } }
  body { font: 16px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--page); margin: 2rem auto;
    max-width: 72rem; padding: 0 1rem; }
  h1 { margin-bottom: 0; } p.made { color: var(--soft); margin-top: .2rem; }
  a { color: var(--bar); }
  .scroll { overflow-x: auto; }
  table { border-collapse: collapse; } th, td { padding: .3rem .7rem; border-bottom: 1px solid var(--line);
    text-align: left; vertical-align: top; } th { font-weight: 600; }
  td.square { white-space: nowrap; } tr > th:first-child { min-width: 12rem; }
  td.asked { min-width: 16rem; } td small, th small { color: var(--soft); font-weight: 400; display: block; }
  .held { color: var(--held); } .broken { color: var(--broken); } .invalid { color: var(--invalid); }
  .unknown { color: var(--unknown); } b.broken, b.invalid { text-decoration: underline; }
  details { border-bottom: 1px solid var(--line); padding: .35rem 0; } summary { cursor: pointer; }
  details > div { background: var(--panel); padding: .7rem 1rem; margin: .4rem 0; border-radius: .4rem; }
  code { font-size: .85rem; overflow-wrap: anywhere; } svg { width: 100%; height: auto; }
  svg text { font: 10px system-ui, sans-serif; fill: var(--ink); } svg text.tick { fill: var(--soft); }
  svg text.run { fill: var(--page); font-size: 8px; } svg text.fault { fill: var(--broken); font-size: 8px; }
  svg line.rail { stroke: var(--line); } svg line.fault { stroke: var(--broken); stroke-dasharray: 3 2; }
  svg rect.run { fill: var(--bar); } svg rect.killed { fill: var(--broken); } svg rect.failed { fill: var(--unknown); }
  svg circle.send { fill: var(--soft); } svg path.seen { fill: none; stroke: var(--seen); stroke-width: 1.5; }
"""

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


def html_page(title: str, body: str, *, more_style: str = "", refresh_s: float | None = None, **values: Any) -> str:
    """The whole file.

    Args:
        body: a Jinja template; `signs` maps verdicts to symbols.
        refresh_s: a browser loads the page again after this long.

    Raises:
        MissingExtra: the extra `report` is not installed.
    """
    try:
        import jinja2
    except ImportError:
        raise MissingExtra("report") from None
    template = jinja2.Environment(autoescape=True).from_string(_HEAD + body + _TAIL)
    text: str = template.render(title=title, style=STYLE + more_style, signs=SIGNS, refresh_s=refresh_s, **values)
    return text
