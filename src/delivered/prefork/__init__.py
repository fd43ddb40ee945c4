"""Python processes forked from one that has imported what they need (decision 087)."""

from pathlib import Path

SOCKET = "DELIVERED_TEMPLATE"
"""Environment variable of a launcher: where the server listens."""
LAUNCHER = Path(__file__).with_name("launch.py")
