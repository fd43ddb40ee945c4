"""A user's job: the pipeline of a file, run until it ends."""

from __future__ import annotations

import sys

import delivered

if __name__ == "__main__":
    delivered.Pipeline.from_file(sys.argv[1]).start().awaitTermination()
