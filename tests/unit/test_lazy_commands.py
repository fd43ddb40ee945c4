"""What a command does not need is not imported: `--help` and an explanation answer at once."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import typer

from delivered.cli.main import COMMANDS, app
from delivered.cli.run import write_example


@pytest.mark.parametrize(
    ("arguments", "code", "ours_max", "never"),
    [
        (["--help"], 0, 4, ("delivered.entry", "delivered.model", "rich", "pyarrow", "numpy", "pydantic", "yaml")),
        (["pln"], 2, 4, ("delivered.entry", "delivered.model", "pyarrow")),
        (["explain", "TOPIC_MISSING"], 0, 40, ("delivered.entry", "delivered.pipeline", "pyspark")),
        (
            ["plan", "orders.yaml"],
            0,
            90,
            ("delivered.operate", "delivered.audit", "delivered.connectors.kafka", "pyspark"),
        ),
    ],
)
def test_modules_that_a_command_imports(
    arguments: list[str], code: int, ours_max: int, never: tuple[str, ...], tmp_path: Path
) -> None:
    write_example(tmp_path)
    program = (
        "import sys, atexit\n"
        "atexit.register(lambda: sys.stderr.write('\\nLOADED ' + ' '.join(sys.modules)))\n"
        "from delivered.cli.main import app\n"
        f"app({arguments!r})"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False, cwd=tmp_path)
    loaded = done.stderr.rpartition("LOADED ")[2].split()
    assert (done.returncode, "typer" in loaded) == (code, True), done.stderr
    assert not set(never) & set(loaded)
    assert len([m for m in loaded if m.partition(".")[0].startswith("delivered")]) <= ours_max


def test_the_list_of_commands_says_what_each_says_itself() -> None:
    group = typer.main.get_command(app)
    assert list(group.commands) == [n for n, p in COMMANDS.items() if not p.hidden]  # type: ignore[attr-defined]
    for name, place in COMMANDS.items():
        command = group.commands[name]  # type: ignore[attr-defined]
        assert (command.name, command.hidden) == (name, place.hidden)
        assert command.get_short_help_str(400) == place.help, name
