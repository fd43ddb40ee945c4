"""`python -m examples.bridges [NAME ...]`: writes build/bridges.json. Exit code 1 if anything is lost or doubled."""

from __future__ import annotations

import argparse
import shutil
import sys
import time
from pathlib import Path

from examples.bridges.all import BRIDGES
from examples.bridges.results import table, write
from examples.bridges.run import run
from rich.console import Console


def main() -> int:
    given = argparse.ArgumentParser(description=__doc__)
    given.add_argument("bridges", nargs="*", metavar="NAME", help=f"of {', '.join(BRIDGES)}; default: all")
    given.add_argument("--out", type=Path, default=Path("build"), help="where results go")
    arguments = given.parse_args()
    unknown = set(arguments.bridges) - BRIDGES.keys()
    if unknown:
        given.error(f"there is no bridge {', '.join(sorted(unknown))}; there are: {', '.join(BRIDGES)}")
    console = Console()
    began = time.monotonic()
    results = []
    for name in arguments.bridges or BRIDGES:
        folder = (arguments.out / "bridges" / name).absolute()
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        console.print(f"[bold]{name}[/bold]")
        results.append(run(BRIDGES[name](), folder, lambda text: console.print(f"  {text}", soft_wrap=True)))
    console.print()
    console.print(table(results))
    file = arguments.out / "bridges.json"
    write(results, file)
    console.print(f"{file}; {time.monotonic() - began:.0f} s", soft_wrap=True)
    return 0 if all(result.clean for result in results) else 1


if __name__ == "__main__":
    sys.exit(main())
