"""Builds src/delivered/model/mix.c with the package. Without a compiler the package works as well, by numpy alone.

With DELIVERED_PURE=1 nothing is compiled: the wheel for systems that no other wheel is for.
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sysconfig
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

SOURCE = Path("src", "delivered", "model", "mix.c")
LIBRARY = SOURCE.with_name("mix.lib")  # no name that Python would import


class Native(BuildHookInterface):  # type: ignore[type-arg]
    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        del version
        if not self._built():
            return
        build_data["artifacts"].append(str(LIBRARY))
        build_data["pure_python"] = False
        platform = sysconfig.get_platform().replace("-", "_").replace(".", "_")
        build_data["tag"] = f"py3-none-{platform}"  # it knows nothing of Python

    def _built(self) -> bool:
        if os.environ.get("DELIVERED_PURE") == "1":
            return False
        root = Path(self.root)
        compiler = shlex.split(os.environ.get("CC", "cc"))
        if shutil.which(compiler[0]) is None:
            self.app.display_warning(
                f"{compiler[0]} was not found: fingerprints are computed by numpy, three times slower"
            )
            return False
        draft = root / LIBRARY.with_suffix(".draft")
        command = [*compiler, "-O3", "-shared", "-fPIC", "-o", str(draft), str(root / SOURCE)]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            self.app.display_warning(
                f"{shlex.join(command)} failed, fingerprints are computed by numpy:\n{done.stderr}"
            )
            return False
        draft.rename(root / LIBRARY)  # whoever has the old one open keeps it
        return True
