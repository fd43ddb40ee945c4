"""Makes the log of a Delta table on a local disk durable: the client links its commits into place without fsync
(deltalake 1.6.6, traced; decision 010)."""

from __future__ import annotations

from pathlib import Path

from delivered.kits.table.durable import sync


def sync_versions(table: Path, first: int, last: int) -> None:
    """fsync those of the commits first..last that exist, and their folder."""
    folder = table / "_delta_log"
    there = [folder / f"{version:020d}.json" for version in range(max(first, 0), last + 1)]
    sync([*(p for p in there if p.exists()), folder])


def sync_checkpoint(table: Path, version: int) -> None:
    """fsync the checkpoint of one version, `_last_checkpoint`, and their folder."""
    folder = table / "_delta_log"
    sync([*folder.glob(f"{version:020d}.checkpoint*"), folder / "_last_checkpoint", folder])
