"""What a transform calls whose value changes: found in the bytecode of every Python of this machine."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from delivered.pipeline import changing

MINORS = range(11, 16)
FUNCTIONS = """
import random
import uuid
from datetime import date, datetime


def joined_loads(frame):
    from random import randint
    from uuid import uuid4
    low, high = 1, 2
    return frame, randint(low, high), uuid4()


def loads_in_pairs(frame):
    from random import randint
    from uuid import uuid4
    return (randint, uuid4, randint, uuid4)


def store_then_load(frame):
    make = uuid.uuid4
    made = make
    other = random.random
    return other, frame


def in_a_comprehension(frame):
    from random import randint
    return [randint(1, n) for n in frame if n]


def in_a_lambda(frame):
    from datetime import UTC
    from datetime import datetime as clock
    return frame.mapInArrow(lambda rows: (rows, clock.now(UTC)), frame.schema)


def in_a_class(frame):
    from uuid import uuid4

    class Processor:
        key = uuid4

        def handle(self):
            return super().handle(date.today())

    return Processor


def in_text(frame):
    return frame.selectExpr("key", "uuid() AS id").where("rand(3) < 1", *["shuffle(a)"])


def with_defaults(frame, *, at=1):
    try:
        return frame.where(at).first()
    finally:
        del at


def deleted(frame):
    from uuid import uuid4
    for n in frame:
        if n:
            made = uuid4
    return made()
"""
EXPECTED = {
    "joined_loads": ["randint()", "uuid4()"],
    "loads_in_pairs": ["randint()", "uuid4()"],
    "store_then_load": ["uuid.uuid4()", "make()", "random.random()", "other()"],
    "in_a_comprehension": ["randint()"],
    "in_a_lambda": ["clock.now()"],
    "in_a_class": ["date.today()", "uuid4()"],
    "in_text": ["uuid()", "rand()", "shuffle()"],
    "with_defaults": [],
    "deleted": ["uuid4()", "made()"],
}
FIND = f"""
import importlib.util, json, sys
spec = importlib.util.spec_from_file_location("changing", {changing.__file__!r})
changing = sys.modules["changing"] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(changing)
names = {{"__name__": "user"}}
exec(compile(sys.stdin.read(), "user.py", "exec"), names)
print(json.dumps({{n: sorted(changing.changing_in_python(names[n])) for n in sys.argv[1:]}}))
"""


def pythons() -> dict[str, str]:
    """Paths by version: those on the path, and those of pyenv."""
    root = Path(os.environ.get("PYENV_ROOT", "~/.pyenv")).expanduser() / "versions"
    found = {f"3.{sys.version_info.minor}": sys.executable}
    for name in (f"3.{minor}" for minor in MINORS):
        named = shutil.which(f"python{name}")
        if named is not None and Path(named).parent.name != "shims":  # pyenv has them for inactive versions, too
            found.setdefault(name, named)
        for managed in sorted(root.glob(f"{name}.*/bin/python{name}")):
            found.setdefault(name, str(managed))
    return found


PYTHONS = pythons()


@pytest.mark.parametrize("version", sorted(PYTHONS))
def test_every_python_finds_the_same(version: str) -> None:
    done = subprocess.run(
        [PYTHONS[version], "-I", "-c", FIND, *EXPECTED], input=FUNCTIONS, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == {name: sorted(calls) for name, calls in EXPECTED.items()}
