"""Code blocks of README and the site, and a reader who runs a page's blocks, from the first to the last."""

from __future__ import annotations

import ast
import contextlib
import io
import os
import re
import shlex
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import yaml
from docs.site import ROOT, pages
from typer.testing import CliRunner

from delivered.cli.main import app

_BLOCK = re.compile(r"^( *)```(\w*)\n(.*?)^ *```$", re.MULTILINE | re.DOTALL)
_HERE = re.compile(r"^(python -|cat > (\S+)) <<'END'\n(.*?)^END$", re.MULTILINE | re.DOTALL)
_FOLDERS = re.compile(r"(?<![\w.])(?<!s3:/)/(?:data|tmp|lake)/")
_RELATIVE = re.compile(r'"(?=(?:checkpoints?|build)\b|\w+\.db")')
_ENDLESS = {"top", "metrics", "ui", "receive"}
_SPARK = {"run", "audit", "replay", "rebuild"}
"""Commands with a session of their own, which this process must not share."""
SHELL_S_MAX = 800


@dataclass(frozen=True)
class Block:
    page: str
    language: str
    text: str

    def __str__(self) -> str:
        return f"{self.page}: {self.text.strip().splitlines()[0][:60]}"


def _blocks() -> Iterator[Block]:
    for page in (Path("README.md"), *pages()):
        for indent, language, text in _BLOCK.findall((ROOT / page).read_text(encoding="utf-8")):
            lines = (line.removeprefix(indent) for line in text.splitlines(keepends=True))
            yield Block(str(page), language, "".join(lines))


BLOCKS = list(_blocks())


ONLY_CHECKED = {
    ("README.md", "make demo"): "the demos and the suite itself, minutes each; examples/ and CI run them",
    ("README.md", "pip install"): "tests/install/test_readme.py runs it where only the wheel is installed",
    (
        "docs/connectors/sqlite.md",
        "",
    ): "a query without its source; tests/install/test_readme.py runs a pipeline into SQLite",
    (
        "docs/connectors/kafka-logins.md",
        "MSKAuthTokenProvider",
    ): "needs Amazon's signer; the page says what ran instead",
    ("docs/transforms.md", ""): "a function and no pipeline; tests/spark/test_failing_transform.py runs such functions",
    ("docs/start-kafka.md", ""): "tests/install/test_readme.py runs it where only the wheel is installed",
    ("CONTRIBUTING.md", "make setup"): "installs, and runs the suite",
    ("docs/new-connector.md", ""): "quoted from examples/toy_sink.py, which the tests that it names run",
    ("docs/declarative.md", ""): "files of `spark-pipelines`: tests/spark/test_declarative.py runs it and kills it",
    ("docs/operate.md", ""): "most serve until they are stopped, which the reader does not handle yet",
    (
        "docs/replay.md",
        "--into orders_0800",
    ): "not tried with the page's times; tests/spark/test_replay.py replays from Kafka",
    (
        "docs/replay.md",
        "rebuild orders.yaml",
    ): "not tried as written; tests/broker/test_rebuild.py kills a swap, tests/spark/test_replay.py rebuilds",
    ("docs/verify.md", "delivered verify"): "hours of faults; the selections are listed by test_code_on_pages.py",
    ("docs/deploy.md", "docker build"): "needs a Docker daemon and a Kubernetes cluster",
    ("docs/deploy.md", "kubernetes-executors.yaml"): "needs a Kubernetes cluster",
    ("docs/audit.md", "--keys 1/1000"): "needs a table of keys; tests/spark/test_audit_keys.py has some",
    (
        "docs/deploy.md",
        "spark-submit",
    ): "needs a standalone cluster and YARN; tests/spark/test_cluster.py and test_deploy.py try the former",
}
"""(page, how a block begins or what it has) -> why the block is checked and planned, but not run by a reader."""


def why_not(block: Block) -> str | None:
    """Why a block is only checked; None: it runs."""
    return next((why for (page, has), why in ONLY_CHECKED.items() if block.page == page and has in block.text), None)


def inner(block: Block) -> Iterator[Block]:
    """What a block of shell hands to Python or writes into a file."""
    for start, file, text in _HERE.findall(block.text) if block.language == "sh" else ():
        yield Block(block.page, "python" if start.startswith("python") else file.rpartition(".")[2], text)


def commands(block: Block) -> Iterator[list[str]]:
    """Commands of a block, each as words; a line that goes on after a backslash is one."""
    text = _HERE.sub("", block.text).replace("\\\n", " ")
    for line in text.splitlines():
        for part in re.split(r"\s(?:&&|\|\||[|;&])\s", line):
            if re.match(r"(delivered|make|pytest|pip|python -m) ", part.strip() + " "):
                yield shlex.split(part, comments=True)


def parsed(text: str) -> ast.Module:
    """A block, or a part of a chain of calls on `frame`, or of the arguments of `call`."""
    for wrapped in (text, f"(frame\n{text})", f"call(\n{text})"):
        try:
            return ast.parse(wrapped)
        except SyntaxError as error:
            first = error
    raise first


@dataclass
class Reader:
    """Runs the blocks of a page in one folder; Python in one namespace, from one block to the next.

    Attributes:
        folder: the working directory; `/data`, `/tmp` and relative paths of the page lie in it.
        names: what the page takes for granted, then also what it defined; `_` is the value of the last expression.
        swap: texts of the page -> what is true here: addresses, and what ends instead of going on forever. A value
            that only a block before it makes is a function.
        environment: variables of the page's commands.
        until: whether a command that goes on forever has done what the page needs of it.
        one_shell: blocks of shell are one: variables and the working directory pass from one to the next.
        said: what each block, or command of a block of `delivered` alone, printed.
        server: a fixture, by name.
    """

    folder: Path
    server: Callable[[str], Any]
    monkeypatch: pytest.MonkeyPatch
    names: dict[str, Any] = field(default_factory=dict)
    swap: dict[str, str | Callable[[], str]] = field(default_factory=dict)
    environment: dict[str, str] = field(default_factory=dict)
    until: Callable[[], bool] = lambda: True
    one_shell: bool = False
    said: list[str] = field(default_factory=list)

    def here(self, text: str) -> str:
        """Text of the page with this machine's addresses and folders."""
        text = _FOLDERS.sub(f"{self.folder}/", text)
        for old, new in self.swap.items():
            if old in text:
                text = text.replace(old, new if isinstance(new, str) else new())
        return text

    def read(self, block: Block) -> None:
        match block.language:
            case "python":
                self._python(block)
            case "yaml":
                self._file(block.text)
            case "sql":
                for statement in filter(str.strip, self.here(block.text).split(";\n")):
                    self.said.append(str(self.names["sql"](statement)))
            case "sh":
                self._shell(block)

    def _python(self, block: Block) -> None:
        text = _RELATIVE.sub(f'"{self.folder}/', self.here(block.text))  # Spark's JVM has another working directory
        tree, output = parsed(text), io.StringIO()
        last = tree.body.pop() if isinstance(tree.body[-1], ast.Expr) else None
        with contextlib.redirect_stdout(output):
            exec(compile(tree, block.page, "exec"), self.names)
            if isinstance(last, ast.Expr):
                self.names["_"] = eval(compile(ast.Expression(last.value), block.page, "eval"), self.names)
            spark = self.names.get("spark")
            for query in spark.streams.active if spark else ():
                query.processAllAvailable()
                query.stop()
        self.said.append(output.getvalue())

    def _file(self, text: str) -> None:
        """A whole pipeline becomes a file for the blocks after it."""
        if name := yaml.safe_load(text).get("pipeline"):
            (self.folder / f"{name}.yaml").write_text(self.here(text))

    def _shell(self, block: Block) -> None:
        """`delivered` alone: line by line. Anything else: in a shell, but for what it installs."""
        words = list(commands(block))
        text = self.here(block.text.replace("\\\n", " "))
        lines = [line for line in text.splitlines() if line and not line.startswith(("#", " "))]
        if all(w[0] == "delivered" for w in words) and len(words) == len(lines):
            for line in lines:
                command = shlex.split(line, comments=True)
                if command[1] in _ENDLESS:
                    self.said.append(self._endless(*command))
                else:
                    self.said.append(self.run(*command) if command[1] in _SPARK else self.delivered(*command[1:]))
        else:
            script = "\n".join(ln for ln in self.here(block.text).splitlines() if not ln.startswith("pip install"))
            self.said.append(self.run("bash", "-e", "-c", script))

    def delivered(self, *words: str) -> str:
        """What a command prints. 3 is no failure: a server or a fact is missing, and the page says so."""
        done = CliRunner().invoke(app, list(words), catch_exceptions=False)
        assert done.exit_code in (0, 3), (words, done.output)
        return done.output

    def _endless(self, *command: str) -> str:
        """Until it says something, answers where it says that it serves, and did what is needed; then SIGTERM."""
        process = subprocess.Popen(
            command,
            cwd=self.folder,
            env=environment(**self.environment),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        try:
            assert process.stdout is not None
            said = process.stdout.readline()
            if served := re.search(r"http://127\S+", said):
                urllib.request.urlopen(served[0], timeout=30).close()
            deadline = time.monotonic() + SHELL_S_MAX
            while not self.until():
                assert process.poll() is None, said + process.stdout.read()
                assert time.monotonic() < deadline
                time.sleep(0.1)
            process.terminate()
            said += process.communicate(timeout=60)[0]
            assert process.returncode in (0, -signal.SIGTERM), said
            return said
        finally:
            process.kill()

    def run(self, *command: str) -> str:
        done = subprocess.run(
            command,
            cwd=self.folder,
            env=environment(**self.environment),
            capture_output=True,
            text=True,
            timeout=SHELL_S_MAX,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout + done.stderr


def environment(**more: str) -> dict[str, str]:
    """Of a reader's shell: without settings of this tree's."""
    hidden = ("PYTHONPATH", "VIRTUAL_ENV", "PYSPARK_PYTHON", "PYTHONHOME")
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    return {k: v for k, v in os.environ.items() if k not in hidden} | {"PATH": path, **more}


Steps = Callable[[Reader], Iterator[None]]


@dataclass(frozen=True)
class Page:
    """How a page is run.

    Attributes:
        steps: prepares what the page takes for granted, yields while its blocks run, and looks at the result.
        servers: fixtures that it needs.
    """

    path: str
    steps: Steps
    servers: tuple[str, ...] = ()
    matrix: bool = False

    def run(self, reader: Reader, *, without: Callable[[Block], object]) -> None:
        around = contextlib.contextmanager(self.steps)
        with around(reader):
            blocks = [b for b in BLOCKS if b.page == self.path and not without(b)]
            if reader.one_shell:
                blocks = [Block(self.path, "sh", "".join(b.text for b in blocks if b.language == "sh"))]
            for block in blocks:
                reader.read(block)


class Pages(list[Page]):
    """Pages that one test runs; `@pages("docs/x.md", "kafka")` above a page's steps adds it."""

    def __call__(self, path: str, *servers: str, matrix: bool = False) -> Callable[[Steps], Steps]:
        def add(steps: Steps) -> Steps:
            self.append(Page(path, steps, servers, matrix))
            return steps

        return add

    def parameters(self) -> list[Any]:
        marks = {True: [pytest.mark.matrix], False: []}
        return [pytest.param(p, id="-".join([Path(p.path).stem, *p.servers]), marks=marks[p.matrix]) for p in self]
