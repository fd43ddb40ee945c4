"""Chromium for tests and pictures of pages: the one that is installed, else Debian's, unpacked without root."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from delivered.machine import cache_folder
from delivered_lab.brokers.servers import fetch_packages

_NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
_QUIET = ("--disable-gpu", "--disable-background-networking", "--disable-component-update", "--no-first-run")


def program(apt: Sequence[str] = ()) -> tuple[str, dict[str, str]]:
    """The program, and the variables that it needs.

    Args:
        apt: more options of apt-get.
    """
    for name in _NAMES:
        if not apt and (found := shutil.which(name)) is not None:
            return found, {}
    command = ["apt-get", "install", "-s", "--no-install-recommends", *apt, "chromium"]
    plan = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    packages = [line.split()[1] for line in plan.splitlines() if line.startswith("Inst ")]
    root = fetch_packages(
        "chromium", cache_folder() / "chromium", packages, "115 MB and the libraries missing here", print
    )
    libraries = [str(root / at / "x86_64-linux-gnu") for at in ("usr/lib", "lib")]
    libraries.append(f"{libraries[0]}/pulseaudio")
    return str(root / "usr/lib/chromium/chromium"), {"LD_LIBRARY_PATH": ":".join(libraries)}


@contextmanager
def browser() -> Iterator[Any]:
    """A headless browser of playwright."""
    from playwright.sync_api import sync_playwright

    path, variables = program()
    with sync_playwright() as playwright:
        made = playwright.chromium.launch(
            executable_path=str(Path(path).resolve()), args=["--no-sandbox", *_QUIET], env={**os.environ, **variables}
        )
        try:
            yield made
        finally:
            made.close()
