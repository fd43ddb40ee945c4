"""Forked workers stand for ordinary interpreters: arguments, environment, streams, exit codes, signals, and without a
template."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from delivered.prefork import SERVE, SOCKET, worker_python

PROBE = """
import os, sys, json
print(json.dumps({"argv": sys.argv[1:], "name": __name__, "folder": os.getcwd(), "given": os.environ.get("GIVEN"),
    "hash": hash("text"), "ready": "pyarrow.compute" in sys.modules, "read": sys.stdin.read(), "pid": os.getpid()}))
print("to stderr", file=sys.stderr)
"""


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Iterator[subprocess.Popen[bytes]]:
    path = tmp_path_factory.mktemp("t") / "t"
    command = [sys.executable, "-u", "-c", SERVE, str(path), "tasks", "pyarrow.compute"]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, env={**os.environ, "PYTHONHASHSEED": "0"})
    process.path = path  # type: ignore[attr-defined]
    deadline = time.monotonic() + 60
    while not path.exists():
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.01)
    yield process
    process.communicate(timeout=20)  # closes its input: it ends
    assert process.returncode == 0


@pytest.fixture
def module(tmp_path: Path) -> Path:
    (tmp_path / "probe.py").write_text(PROBE)
    (tmp_path / "ends.py").write_text("import sys\nsys.exit(int(sys.argv[1]))")
    (tmp_path / "dies.py").write_text("import os, sys\nos.kill(os.getpid(), int(sys.argv[1]))")
    (tmp_path / "fails.py").write_text("raise ValueError('no')")
    (tmp_path / "waits.py").write_text(
        "import os, sys, threading\nprint(os.getpid(), flush=True)\nthreading.Event().wait()"
    )
    return tmp_path


def environment(template: subprocess.Popen[bytes], module: Path, **more: str) -> dict[str, str]:
    path = str(template.path)  # type: ignore[attr-defined]
    return {**os.environ, SOCKET: path, "PYTHONPATH": str(module), "PYTHONHASHSEED": "0", **more}


def run(env: dict[str, str], folder: Path, *arguments: str, given: str = "") -> subprocess.CompletedProcess[str]:
    command = [worker_python(), "-m", *arguments]
    return subprocess.run(command, env=env, cwd=folder, input=given, capture_output=True, text=True, timeout=60)


def test_a_forked_worker_is_like_an_ordinary_one(template: subprocess.Popen[bytes], module: Path) -> None:
    import json

    env = environment(template, module, GIVEN="here")
    forked = run(env, module, "probe", "a", "b c", given="input")
    ordinary = run({k: v for k, v in env.items() if k != SOCKET}, module, "probe", "a", "b c", given="input")
    found, expected = json.loads(forked.stdout), json.loads(ordinary.stdout)
    assert found.pop("ready") and not expected.pop("ready")
    assert found.pop("pid") != expected.pop("pid")
    assert found == expected == {
        "argv": ["a", "b c"], "name": "__main__", "folder": str(module), "given": "here",
        "hash": expected["hash"], "read": "input",
    }  # fmt: skip
    assert forked.stderr == ordinary.stderr == "to stderr\n"


def test_another_hash_seed_gets_an_interpreter_of_its_own(template: subprocess.Popen[bytes], module: Path) -> None:
    import json

    env = environment(template, module, PYTHONHASHSEED="7")
    found = json.loads(run(env, module, "probe").stdout)
    assert not found["ready"]
    assert found["hash"] == json.loads(run({**env, SOCKET: ""}, module, "probe").stdout)["hash"]


@pytest.mark.parametrize("how", [("ends", "0"), ("ends", "7"), ("dies", "9"), ("dies", "15"), ("fails",)])
def test_it_ends_as_the_worker_does(template: subprocess.Popen[bytes], module: Path, how: tuple[str, ...]) -> None:
    env = environment(template, module)
    forked, ordinary = run(env, module, *how), run({**env, SOCKET: ""}, module, *how)
    assert forked.returncode == ordinary.returncode
    assert ("ValueError: no" in forked.stderr) == ("ValueError: no" in ordinary.stderr) == (how == ("fails",))


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_whoever_ends_the_launcher_ends_the_worker(
    template: subprocess.Popen[bytes], module: Path, number: signal.Signals
) -> None:
    env = environment(template, module)
    launcher = subprocess.Popen([worker_python(), "-m", "waits"], env=env, cwd=module, stdout=subprocess.PIPE)
    assert launcher.stdout is not None
    worker = psutil.Process(int(launcher.stdout.readline()))
    assert worker.pid != launcher.pid and worker.ppid() == template.pid
    launcher.send_signal(number)
    assert launcher.wait(60) == -number
    assert launcher.stdout.read() == b"", "the worker's output is closed"
    worker.wait(60)
    assert template.poll() is None


def test_a_launcher_that_is_killed_before_it_read_the_answer_ends_the_worker_alone(
    template: subprocess.Popen[bytes], module: Path
) -> None:
    import marshal
    import socket

    env = environment(template, module)
    request = marshal.dumps((["-m", "waits"], env, str(module)))
    read, write = os.pipe()
    launcher = socket.socket(socket.AF_UNIX)
    launcher.connect(env[SOCKET])
    socket.send_fds(launcher, [len(request).to_bytes(4, "big")], [0, write, 2])
    launcher.sendall(request)
    os.close(write)
    output = os.fdopen(read)
    worker = psutil.Process(int(output.readline()))
    launcher.close()  # with unread data: the other side's read fails
    worker.wait(60)
    assert output.read() == ""
    output.close()
    assert template.poll() is None
    assert run(env, module, "ends", "3").returncode == 3


BOTH = """
import os, selectors, socket
from delivered.prefork import Server
listener = socket.socket(socket.AF_UNIX)
server = Server(listener, "tasks")
launcher, other_end = socket.socketpair()
worker = os.fork()
if not worker:
    os._exit(0)
server._children[worker] = launcher
server._selector.register(launcher, selectors.EVENT_READ)
os.waitid(os.P_PID, worker, os.WEXITED | os.WNOWAIT)
other_end.close()
ready = [key.fileobj for key, _ in server._selector.select()]
assert launcher in ready and server._ended in ready
server._reap()
server._hear(launcher)
assert not server._children
"""


def test_a_worker_and_its_launcher_that_end_at_once_do_not_end_the_template() -> None:
    """Both are known from one look, and the first to be handled closes the connection of the second."""
    done = subprocess.run(
        [sys.executable, "-c", BOTH], stdin=subprocess.PIPE, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


def test_without_a_template_it_is_an_ordinary_interpreter(template: subprocess.Popen[bytes], module: Path) -> None:
    gone = module / "gone"
    env = environment(template, module)
    assert run({**env, SOCKET: str(gone)}, module, "ends", "3").returncode == 3
    import socket

    with socket.socket(socket.AF_UNIX) as bound:  # the template was killed: its socket's name is left
        bound.bind(str(gone))
    assert run({**env, SOCKET: str(gone)}, module, "ends", "3").returncode == 3
