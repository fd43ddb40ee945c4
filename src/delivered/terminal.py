"""Printing with rich, of text that nobody here wrote: ids and keys of records, names, answers of servers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from rich.console import Console, ConsoleOptions, ConsoleRenderable, RenderHook
from rich.segment import Segment

from delivered.model.errors import plain


def printer(**settings: Any) -> Console:
    """A console that prints text as it is: brackets are no markup, :smile: is no emoji, and control characters are
    escapes."""
    console = Console(highlight=False, markup=False, emoji=False, **settings)
    console.push_render_hook(_Plain())
    return console


class _Plain(RenderHook):
    def process_renderables(self, renderables: list[ConsoleRenderable]) -> list[ConsoleRenderable]:
        return [_Escaped(r) for r in renderables]


@dataclass(frozen=True)
class _Escaped:
    inner: ConsoleRenderable

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Segment]:
        for segment in console.render(self.inner, options):
            yield segment if segment.control else segment._replace(text=plain(segment.text))
