"""The model of the protocol: a part of `make model` that takes seconds; and that its page names code that exists."""

import re
from pathlib import Path

import pytest
from model.check import RUNS, check

ROOT = Path(__file__).parents[2]


@pytest.mark.matrix
def test_the_model_holds_and_finds_what_each_rule_prevents():
    said: list[str] = []
    assert check(said.append, quick=True), "\n".join(said)
    assert len(said) == sum(run.quick for run in RUNS)


def test_each_action_of_the_model_names_its_code():
    page = (ROOT / "docs" / "protocol.md").read_text(encoding="utf-8")
    module = (ROOT / "model" / "Delivered.tla").read_text(encoding="utf-8")
    table = page.partition("## Each action")[2].partition("\n## ")[0]
    named = set[str]()
    for line in table.splitlines():
        if line.startswith("| `"):
            actions, code = line.strip("| ").split(" | ")
            named |= set(re.findall(r"`(\w+)`", actions))
            for file, functions in re.findall(r"`([\w/]+\.py)`((?:,? `\w+`)*)", code):
                text = (ROOT / "src" / "delivered" / file).read_text(encoding="utf-8")
                for function in re.findall(r"`(\w+)`", functions):
                    assert re.search(rf"def {function}\b", text), (file, function)
    following = module.partition("\nNext ==")[2].partition("Spec ==")[0]
    assert named == set(re.findall(r"(\w+)\((?:d|s|p|lost)\b", following))
