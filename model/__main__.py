"""Checks the model in full, and that it finds what is wrong without each rule: `python -m model`, or `make model`."""

from __future__ import annotations

import sys

from model.check import check

if __name__ == "__main__":
    sys.exit(0 if check(print) else 1)
