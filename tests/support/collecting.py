"""What collecting thousands of tests costs, once and not in each process of `pytest -n`."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from _pytest.assertion import rewrite


@contextmanager
def quick_collection(config: pytest.Config) -> Iterator[None]:
    """Surrounds the collection."""
    _rewrite_share(config)
    gc.disable()  # modules and tests are no garbage, and a sixth of the time went into looking for some
    try:
        yield
    finally:
        gc.collect()
        gc.freeze()  # nor are they later
        gc.enable()


def _rewrite_share(config: pytest.Config) -> None:
    """Keep the asserts of some test modules in a new tree rewritten, while other processes do so with the others.

    Pytest rewrites a module when it imports it, and all processes import all modules, at the same time.
    """
    worker, count = (os.environ.get(f"PYTEST_XDIST_WORKER{name}") for name in ("", "_COUNT"))
    if worker is None or count is None:
        return
    places = [config.invocation_params.dir / arg.partition("::")[0] for arg in config.args]
    files = {
        file for place in places for file in (place.rglob("test_*.py") if place.is_dir() else [place]) if file.is_file()
    }
    largest_first = sorted(files, key=lambda file: (-file.stat().st_size, file))
    for file in largest_first[int(worker.removeprefix("gw")) :: int(count)]:
        kept = rewrite.get_cache_dir(file) / (file.stem + rewrite.PYC_TAIL)
        if rewrite._read_pyc(file, kept) is None and rewrite.try_makedirs(kept.parent):
            source, code = rewrite._rewrite_test(file, config)
            rewrite._write_pyc(config.stash[rewrite.assertstate_key], code, source, kept)
