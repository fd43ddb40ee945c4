"""A table of MariaDB."""

from __future__ import annotations

from delivered_lab.verify.systems.mysql import build_system

SYSTEM = build_system("mariadb", {})
