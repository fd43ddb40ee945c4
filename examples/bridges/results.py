"""What became of the orders, as a table and as JSON."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from examples.bridges.run import Result
from rich import box
from rich.table import Table

_NUMBERS = ("sent", "delivered", "lost", "duplicated")


def table(results: Sequence[Result]) -> Table:
    title = "Orders over bridges, exactly once; counted with the sinks' own clients"
    found = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    found.add_column("bridge", no_wrap=True)
    for name in _NUMBERS:
        found.add_column(name, justify="right", no_wrap=True)
    found.add_column("kills", no_wrap=True)
    found.add_column("audit", no_wrap=True)
    for result in results:
        style = "green" if result.clean else "bold red"
        arrived = result.arrived
        receivers = f" and {len(arrived.receiver_kills)} of receivers" if arrived.receiver_kills else ""
        found.add_row(
            arrived.bridge,
            *(f"{getattr(arrived, name):,}" for name in _NUMBERS),
            f"{len(arrived.kills)}{receivers}",
            f"[{style}]{result.audit}[/{style}]",
        )
    return found


def write(results: Sequence[Result], file: Path) -> None:
    file.write_text(json.dumps([asdict(r) for r in results], indent=2, default=str) + "\n", encoding="utf-8")
