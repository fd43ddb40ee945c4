"""`python -m examples.shop`: writes build/shop.json. Exit code 1 if an order is lost or doubled, or a cent.

`--without inbox` or `--without keys` shows what each is for.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import sys
import time
from pathlib import Path

from examples.shop.run import Result, run
from rich import box
from rich.console import Console
from rich.table import Table

_NUMBERS = ("orders", "paid", "compensated", "stuck", "mails", "lost", "doubled")


def main() -> int:
    given = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    given.add_argument("--seconds", type=float, default=120.0, help="how long everything is killed")
    given.add_argument("--without", choices=("inbox", "keys"), default="", help="leave it out; this run must fail")
    given.add_argument("--seed", type=int, default=random.randrange(1_000_000), help="of requests and kills")
    given.add_argument("--out", type=Path, default=Path("build"), help="where results go")
    arguments = given.parse_args()
    console, began = Console(), time.monotonic()
    folder = (arguments.out / "shop").absolute()
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    console.print(f"seed {arguments.seed}")

    def say(text: str) -> None:
        console.print(f"{time.monotonic() - began:5.0f} s  {text}", soft_wrap=True, highlight=False)

    result = run(folder, arguments.seconds, arguments.without, arguments.seed, say)
    console.print()
    console.print(_table(result))
    for name, (lost, doubled) in result.verdict.places.items():
        if lost or doubled:
            console.print(f"{name}: {lost} lost, {doubled} doubled")
    console.print(f"delivered audit --chain relay.yaml enrich.yaml: {result.audit}")
    file = arguments.out / "shop.json"
    file.write_text(json.dumps(_json(result), indent=2) + "\n", encoding="utf-8")
    console.print(f"{file}; {time.monotonic() - began:.0f} s", soft_wrap=True)
    return 0 if result.clean else 1


def _json(result: Result) -> dict[str, object]:
    verdict = result.verdict
    return {
        **{name: getattr(verdict, name) for name in _NUMBERS},
        "balance": float(verdict.balance),
        "kills": sum(result.kills.values()),
        "killed": result.kills,
        "arrived_meanwhile": result.arrived,
        "audit": result.audit,
        "places": {name: {"lost": lost, "doubled": doubled} for name, (lost, doubled) in verdict.places.items()},
    }


def _table(result: Result) -> Table:
    verdict, style = result.verdict, "green" if result.verdict.clean else "bold red"
    title = f"A shop after {sum(result.kills.values())} kills; counted with plain clients"
    found = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    for name in (*_NUMBERS, "balance"):
        found.add_column(name, justify="right", no_wrap=True)
    numbers = [f"{getattr(verdict, name):,}" for name in _NUMBERS]
    found.add_row(*numbers[:-2], *(f"[{style}]{n}[/{style}]" for n in (*numbers[-2:], f"{verdict.balance:.2f}")))
    return found


if __name__ == "__main__":
    sys.exit(main())
