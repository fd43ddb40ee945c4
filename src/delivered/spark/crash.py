"""What a worker of Spark does before it works for us: arm crash points, and tell people what they should know."""

from __future__ import annotations

import logging
import os

TOLD = "delivered: "
"""Starts each line that a worker writes to standard error for people. `delivered run` shows these lines."""

_armed = False


def arm() -> None:
    """Install the handler of `delivered.testing` if the environment names a crash point. Cheap when it does not."""
    global _armed
    _tell()
    if _armed or not os.environ.get("DELIVERED_CRASH"):
        return
    from delivered.testing.crash import install_from_environment

    install_from_environment()
    _armed = True


def _tell() -> None:
    """Warnings go to standard error, which Spark passes on to its own log: nobody configures logging in a worker."""
    ours = logging.getLogger("delivered")
    if logging.getLogger().handlers or any(not isinstance(h, logging.NullHandler) for h in ours.handlers):
        return
    handler = logging.StreamHandler()
    handler.setLevel(logging.WARNING)
    handler.setFormatter(logging.Formatter(f"%(asctime)s {TOLD}%(message)s", "%H:%M:%S"))
    ours.addHandler(handler)
