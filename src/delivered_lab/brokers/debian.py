"""Servers from Debian's packages, unpacked into the cache folder: nothing is installed, no root is needed."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from delivered.model.errors import DeliveredError
from delivered_lab.brokers.fetch import Say

_TIMEOUT_S = 600.0


def unpacked(
    system: str,
    root: Path,
    packages: Sequence[str],
    size: str,
    say: Say,
    mend: Callable[[Path, Path], None] | None = None,
) -> Path:
    """The folder with the files of these packages, fetched once.

    Args:
        system: its name, for messages.
        root: the folder.
        size: of the download, for messages.
        mend: called with the folder of the unpacked files and with `root`, their final place.

    Raises:
        DeliveredError: no Debian system, or the download failed.
    """
    if (root / ".ready").exists():
        return root
    if None in [shutil.which(p) for p in ("apt-get", "dpkg-deb")]:
        raise DeliveredError(
            f"{system.upper()}_MISSING",
            f"{system} comes from Debian's packages, but there is no apt-get here.",
            next_step=f"start a {system} yourself, and use its URL",
        )
    root.parent.mkdir(parents=True, exist_ok=True)
    say(f"fetching {system} from Debian's packages, once ({size})")
    work = Path(tempfile.mkdtemp(prefix=".fetch-", dir=root.parent))
    try:
        _run(system, ["apt-get", "download", "-q", *packages], work)
        made = work / "root"
        for package in sorted(work.glob("*.deb")):
            _run(system, ["dpkg-deb", "-x", str(package), str(made)], work)
        if mend is not None:
            mend(made, root)
        (made / ".ready").touch()
        with suppress(OSError):  # another process has fetched the same
            made.rename(root)
    finally:
        shutil.rmtree(work, ignore_errors=True)
    return root


def _run(system: str, command: list[str], folder: Path) -> None:
    try:
        done = subprocess.run(
            command, cwd=folder, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False,
            env={**os.environ, "LC_ALL": "C"},
        )  # fmt: skip
        failed, output = done.returncode != 0, done.stderr.strip()
    except subprocess.TimeoutExpired:
        failed, output = True, f"not finished after {_TIMEOUT_S:.0f} s"
    if failed:
        raise DeliveredError(
            "DOWNLOAD_FAILED",
            f"{command[0]} failed while {system} was being fetched. Output: {output[-600:]}",
            next_step="run apt-get update, check the connection to Debian's servers, and run the command again",
        )
