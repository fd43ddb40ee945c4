"""Diagrams of docs/explanation.md and docs/receiver.md: steps in a row, and what a crash between two of them costs.

Each has a second drawing for narrow screens, which docs/site.py offers. Both follow the reader's colours by
`prefers-color-scheme`, on the site and on GitHub, as docs/protocol.svg does.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path

FOLDER = Path(__file__).parent / "diagrams"
DARK = "<style>@media (prefers-color-scheme: dark) { svg { filter: invert(.93) hue-rotate(180deg) } }</style>"
"""For charts that have colours of their own: a dark page inverts them and keeps their hues."""
_WIDTH, _GAP, _TOP, _HEIGHT = 168, 26, 44, 78
_STYLE = """<style>
  svg { --ink: #1f2328; --soft: #59636e; --line: #8c959f; --box: #f6f8fa; --deciding: #0a7d33; --crash: #cf222e }
  @media (prefers-color-scheme: dark) {
    svg { --ink: #e6edf3; --soft: #9198a1; --line: #656c76; --box: #212830; --deciding: #3fb950; --crash: #f85149 }
  }
  text { font: 15px system-ui, sans-serif; fill: var(--ink); text-anchor: middle }
  .small { font-size: 12.5px; fill: var(--soft) }
  .step { font-weight: 600 }
  .box { fill: var(--box); stroke: var(--line) }
  .deciding { stroke: var(--deciding); stroke-width: 2.5 }
  .arrow { stroke: var(--line); stroke-width: 1.5; fill: none }
  .crash { fill: var(--crash); font-weight: 700 }
</style>"""


@dataclass(frozen=True)
class Step:
    """
    Attributes:
        where: who does it: task, driver, receiver.
        text: lines below its name.
        crash: what a crash right after it costs.
    """

    name: str
    where: str
    text: tuple[str, ...]
    crash: tuple[str, ...]
    decides: bool = False


@dataclass(frozen=True)
class Diagram:
    title: str
    steps: Sequence[Step]


_UNDECIDED = ("nothing is visible;", "the batch runs again")
_LOGGED = Step("log", "Spark", ("commits/N", "ends the batch"), ("nothing to do",))

DIAGRAMS = {
    "two-phase-commit": Diagram(
        "Two-phase commit: Kafka, Pulsar, RocketMQ, PostgreSQL and MySQL with two_phase",
        (
            Step("stage", "task", ("rows in an open", "transaction"), ("the transaction", "is aborted")),
            Step("prepare", "task", ("a marker; flushed,", "left open"), _UNDECIDED),
            Step("decide", "driver", ("one ledger record", "names all shards"), ("next start", "commits them"), True),
            Step("apply", "driver", ("commits each", "transaction"), ("markers say which", "are committed")),
            _LOGGED,
        ),
    ),
    "ledger-row": Diagram(
        "Ledger row in the sink's transaction: PostgreSQL, MySQL, SQLite",
        (
            Step("stage", "task", ("rows in a table or", "file of their own"), ("the next start", "drops them")),
            Step("prepare", "task", ("committed there,", "invisible"), _UNDECIDED),
            Step(
                "decide, apply",
                "driver",
                ("one transaction: rows", "and ledger row"),
                ("the batch counts", "and is visible"),
                True,
            ),
            _LOGGED,
        ),
    ),
    "table-commit": Diagram(
        "One commit to the table's log: Delta Lake, Iceberg",
        (
            Step("stage", "task", ("data files that no", "version names"), ("the next start", "deletes them")),
            Step("prepare", "task", ("files are durable,", "fingerprints known"), _UNDECIDED),
            Step(
                "decide, apply",
                "driver",
                ("one commit: all files", "and the batch's record"),
                ("the batch counts", "and is visible"),
                True,
            ),
            _LOGGED,
        ),
    ),
    "rename": Diagram(
        "Rename of the batch's folder: Parquet, JSON, CSV",
        (
            Step("stage", "task", ("files in a hidden", "folder"), ("the next start", "deletes them")),
            Step("prepare", "task", ("fsynced", ""), _UNDECIDED),
            Step(
                "decide, apply",
                "driver",
                ("one rename of files", "with their record"),
                ("the batch counts", "and is visible"),
                True,
            ),
            _LOGGED,
        ),
    ),
    "receiver": Diagram(
        "A receiver: from a queue to a log that can be replayed",
        (
            Step("take", "receiver", ("messages stay", "unacknowledged"), ("the queue", "redelivers them")),
            Step(
                "persist",
                "receiver",
                ("one append with", "the messages' ids"),
                ("redelivered; known", "ids are dropped"),
                True,
            ),
            Step("ack", "receiver", ("the queue deletes", "the messages"), ("they are in the log",)),
            Step("read", "pipeline", ("offsets of the log,", "any number of times"), ("the same batch", "runs again")),
        ),
    ),
    "several-sinks": Diagram(
        "Several sinks: one decision for all of them",
        (
            Step("stage", "task", ("the shard's rows,", "into each sink"), ("all are aborted",)),
            Step("prepare", "task", ("each sink that can", "prepare does"), _UNDECIDED),
            Step(
                "decide",
                "driver",
                ("one record; the sink that", "cannot prepare decides"),
                ("the batch counts", "in every sink"),
                True,
            ),
            Step("apply", "driver", ("the other sinks", "commit"), ("next start", "applies the rest")),
            _LOGGED,
        ),
    ),
    "recovery": Diagram(
        "Recovery: what every start does before it reads a record",
        (
            Step("claim", "driver", ("a new epoch fences", "earlier drivers"), ("the next start", "claims again")),
            Step("look", "driver", ("ledger, markers,", "checkpoint"), ("nothing changed",)),
            Step("finish", "driver", ("decided batches", "become visible"), ("apply may be", "repeated")),
            Step("abort", "driver", ("orphans that no", "decision names"), ("the next start", "aborts the rest")),
            Step("continue", "driver", ("the next batch", "is planned"), ("as any batch",)),
        ),
    ),
}
"""Name of the file -> diagram."""


def _text(x: int, y: int, text: str, kind: str = "") -> str:
    return f'<text x="{x}" y="{y}"{f" class={kind!r}" if kind else ""}>{escape(text)}</text>'.replace("'", '"')


def _step(step: Step, left: int, top: int, where: tuple[int, int], crash: tuple[int, int]) -> list[str]:
    """A box, with who does it and what a crash costs at the given places."""
    kind = "box deciding" if step.decides else "box"
    middle = left + _WIDTH // 2
    return [
        _text(*where, step.where, "small"),
        f'<rect class="{kind}" x="{left}" y="{top}" width="{_WIDTH}" height="{_HEIGHT}" rx="8"/>',
        _text(middle, top + 24, step.name, "step"),
        *(_text(middle, top + 45 + 18 * n, line, "small") for n, line in enumerate(step.text)),
        _text(*crash, "✕ killed here", "crash"),
        *(_text(crash[0], crash[1] + 20 + 18 * n, line, "small") for n, line in enumerate(step.crash)),
    ]


def _svg(diagram: Diagram, width: int, height: int, lines: list[str]) -> str:
    said = ". ".join(f"{s.name}: {' '.join(s.text)}; killed after it: {' '.join(s.crash)}" for s in diagram.steps)
    size = f'viewBox="0 0 {width} {height}" width="{width}" height="{height}"'
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img">',
            f"<title>{escape(diagram.title)}</title><desc>{escape(said)}</desc>",
            _STYLE,
            *lines,
            "</svg>",
            "",
        ]
    )


def wide(diagram: Diagram) -> str:
    """Steps in a row."""
    lines = []
    for i, step in enumerate(diagram.steps):
        left = 20 + i * (_WIDTH + _GAP)
        middle = left + _WIDTH // 2
        lines += _step(step, left, _TOP, (middle, 28), (middle, _TOP + _HEIGHT + 24))
        if i:
            at = _TOP + _HEIGHT // 2
            lines.append(f'<path class="arrow" d="M{left - _GAP} {at}H{left - 3}m-6 -5 6 5 -6 5"/>')
    return _svg(diagram, len(diagram.steps) * (_WIDTH + _GAP) - _GAP + 40, 200, lines)


def narrow(diagram: Diagram) -> str:
    """Steps below each other, for a telephone."""
    lines = []
    middle, aside = 4 + _WIDTH // 2, 4 + _WIDTH + 88
    for i, step in enumerate(diagram.steps):
        top = 4 + i * (_HEIGHT + _GAP)
        lines += _step(step, 4, top, (aside, top + 12), (aside, top + 34))
        if i:
            lines.append(f'<path class="arrow" d="M{middle} {top - _GAP}V{top - 3}m-5 -6 5 6 5 -6"/>')
    return _svg(diagram, _WIDTH + 180, len(diagram.steps) * (_HEIGHT + _GAP) - _GAP + 8, lines)


def pages() -> dict[Path, str]:
    return {FOLDER / f"{name}.svg": wide(diagram) for name, diagram in DIAGRAMS.items()} | {
        FOLDER / f"{name}-narrow.svg": narrow(diagram) for name, diagram in DIAGRAMS.items()
    }


def follow_dark(picture: Path) -> None:
    """Let a chart that was drawn for a light page follow a dark one."""
    text = picture.read_text(encoding="utf-8")
    if DARK not in text:
        end = text.index(">", text.index("<svg")) + 1
        picture.write_text(text[:end] + DARK + text[end:], encoding="utf-8")
