"""Where cases run: a folder, servers started on first use, and small disks."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from delivered_lab import brokers
from delivered_lab.verify.systems import KAFKA, SYSTEMS
from delivered_lab.verify.template import Template

Say = Callable[[str], None]


class Environment:
    """Runs cases one after the other.

    Args:
        env: for the pipelines' processes.
        sink_options: override the options of every sink in the pipeline file; `format` replaces the connector.
        template: the user's own pipeline, run by every case.
        source_format: a connector that replaces the one of every queue.
        variant: what the programs of both ends do wrong on purpose; empty: nothing.
    """

    def __init__(
        self,
        folder: Path,
        say: Say,
        env: dict[str, str] | None = None,
        sink_options: dict[str, Any] | None = None,
        template: Template | None = None,
        source_format: str | None = None,
        variant: str = "",
    ) -> None:
        self.variant = variant
        self.folder = folder
        self.source_format = source_format
        self.template = template
        self.env = dict(env or {})
        if template is not None:
            parts = [str(template.folder), self.env.get("PYTHONPATH", os.environ.get("PYTHONPATH", ""))]
            self.env["PYTHONPATH"] = os.pathsep.join(p for p in parts if p)
        self.sink_options = sink_options or {}
        self._say = say
        self._servers: dict[str, brokers.Broker] = {}

    def server(self, kind: str) -> brokers.Broker:
        """This environment's server, started on first use; `kind` as named by `delivered_lab.brokers`."""
        if kind not in self._servers:
            place = self._place(kind)
            shutil.rmtree(place, ignore_errors=True)
            self._say(f"starting {kind}")
            properties = dict(SYSTEMS[kind].properties)
            self._servers[kind] = brokers.start(kind, place, properties=properties, dies_with_parent=True)
        return self._servers[kind]

    def close(self) -> None:
        while self._servers:
            kind, server = self._servers.popitem()
            server.kill()
            shutil.rmtree(self._place(kind), ignore_errors=True)

    def _place(self, kind: str) -> Path:
        return self.folder / ("broker" if kind == KAFKA else kind)


def can_mount() -> bool:
    """Whether this process may mount a small disk."""
    return os.geteuid() == 0 and shutil.which("mount") is not None


@contextlib.contextmanager
def small_disk(folder: Path, megabytes: int) -> Iterator[Path]:
    """A disk of its own for a folder, unmounted on exit."""
    folder.mkdir(parents=True, exist_ok=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={megabytes}m", "tmpfs", str(folder)], check=True)
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=False)
