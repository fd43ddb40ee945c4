"""Compiles the package's C files. Without a compiler the package works as well: by numpy, and by librdkafka alone.
Writes README into the package's metadata with links that a package index can show.

With DELIVERED_PURE=1 nothing is compiled: the wheel for systems that no other wheel is for. `python hatch_build.py`
compiles in place, for work on the C files, and renews an editable install's entry points.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tomllib
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface
from hatchling.metadata.plugin.interface import MetadataHookInterface

SOURCES = (
    Path("src", "delivered", "model", "mix.c"),
    Path("src", "delivered", "clients", "kafka", "record_batch.c"),
)


def library(source: Path) -> Path:
    return source.with_suffix(".lib")  # no name that Python would import


class Native(BuildHookInterface):  # type: ignore[type-arg]
    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        del version
        if os.environ.get("DELIVERED_PURE") == "1":
            return
        if reason := compile_all(Path(self.root)):
            self.app.display_warning(
                f"{reason}\nFingerprints are computed by numpy, three times slower, and Kafka is read and written by "
                "librdkafka alone."
            )
            return
        build_data["artifacts"] += [str(library(source)) for source in SOURCES]
        build_data["pure_python"] = False
        platform = sysconfig.get_platform().replace("-", "_").replace(".", "_")
        build_data["tag"] = f"py3-none-{platform}"  # it knows nothing of Python


class Description(MetadataHookInterface):
    """The description on a package index: README, which links to files of the repository."""

    def update(self, metadata: dict[str, Any]) -> None:
        text = Path(self.root, "README.md").read_text(encoding="utf-8")
        source = metadata.get("urls", {}).get("Source", "")
        metadata["readme"] = {"content-type": "text/markdown", "text": with_absolute_links(text, source)}


_PICTURE = re.compile(r"^!\[([^\]]*)\]\((?!https:)([^)\s]+)\)\n", re.MULTILINE)
_LINK = re.compile(r"(?<!!)\[([^\]]+)\]\((?!https:)([^)\s]+)\)")


def with_absolute_links(readme: str, source: str) -> str:
    """README with links and pictures at `source`, the address of the repository; without one, with neither: relative
    ones would lead nowhere."""
    if not source:
        return _LINK.sub(r"\1", _PICTURE.sub("", readme))
    return _LINK.sub(rf"[\1]({source}/blob/HEAD/\2)", _PICTURE.sub(rf"![\1]({source}/raw/HEAD/\2)\n", readme))


def compile_all(root: Path) -> str:
    """Compile each C file into a library beside it. Returns why not; empty: all were compiled."""
    compiler = shlex.split(os.environ.get("CC", "cc"))
    if shutil.which(compiler[0]) is None:
        return f"{compiler[0]} was not found."
    for source in SOURCES:
        draft = root / source.with_suffix(".draft")
        command = [*compiler, "-O3", "-shared", "-fPIC", "-o", str(draft), str(root / source)]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            return f"{shlex.join(command)} failed:\n{done.stderr}"
        draft.rename(root / library(source))  # whoever has the old one open keeps it
    return ""


def renew_entry_points(root: Path) -> None:
    """An editable install of this checkout keeps the entry points of the day it was made; a new connector needs one."""
    project = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    for installed in distributions(name=project["name"]):
        if root.as_uri() in (installed.read_text("direct_url.json") or ""):
            groups = {"console_scripts": project["scripts"], **project["entry-points"]}
            text = "\n".join(
                f"[{group}]\n" + "".join(f"{name} = {place}\n" for name, place in sorted(entries.items()))
                for group, entries in groups.items()
            )
            folder = f"{installed.name}-{installed.version}.dist-info"
            Path(str(installed.locate_file(folder)), "entry_points.txt").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    here = Path(__file__).resolve().parent
    renew_entry_points(here)
    sys.exit(compile_all(here) or None)
