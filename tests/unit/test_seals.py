"""Seals and their chain."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from tests.support.seals import chain, texts

from delivered.audit.evidence import Verdict
from delivered.audit.seal import SEAL_FORMAT, Seal, chain_faults
from delivered.model.errors import Refused
from delivered.model.identity import Scope


def test_a_seal_is_read_as_it_was_written() -> None:
    for seal in chain(3):
        assert Seal.parse(seal.text) == seal
        assert Seal.parse(seal.text).text == seal.text


def test_fields_of_a_later_release_are_kept() -> None:
    text = json.dumps({**json.loads(chain(1)[0].text), "weather": "fair"}, separators=(",", ":"), sort_keys=True)
    assert Seal.parse(text).text == text


def test_a_seal_of_a_later_format_is_refused() -> None:
    text = json.dumps({**json.loads(chain(1)[0].text), "format": SEAL_FORMAT + 1})
    with pytest.raises(Refused, match="DELIVERED_FORMAT_NEWER"):
        Seal.parse(text)


def test_an_intact_chain_has_no_faults() -> None:
    seals = texts(chain(5))
    assert not list(chain_faults(seals))
    assert not list(chain_faults(seals[2:]))


def test_a_changed_seal_is_found() -> None:
    seals = chain(4)
    changed = replace(seals[1], verdict=Verdict.BROKEN)
    assert list(chain_faults([seals[0].text, changed.text, seals[2].text])) == [
        "seal 1 has changed since seal 2 was made: its hash is another one"
    ]


def test_a_missing_seal_is_found() -> None:
    seals = texts(chain(4))
    assert "seal 2 follows seal 0" in list(chain_faults([seals[0], *seals[2:]]))


def test_reordered_seals_are_found() -> None:
    seals = texts(chain(4))
    assert "seal 1 follows seal 2" in list(chain_faults([seals[0], seals[2], seals[1], seals[3]]))


def test_sums_that_do_not_add_up_are_found() -> None:
    seals = chain(2)
    more = replace(seals[1], total=seals[1].total + seals[1].sums)
    assert list(chain_faults([seals[0].text, more.text])) == [
        "seal 1: its total is not that of seal 0 and its own sums"
    ]


def test_a_new_checkpoint_starts_with_its_first_batch() -> None:
    seals = chain(2)
    other = replace(seals[1], scope=Scope("orders", "kafka", "9c1d"), first=0, start="", total=seals[1].sums)
    assert not list(chain_faults([seals[0].text, other.text]))
    late = replace(other, first=3)
    assert list(chain_faults([seals[0].text, late.text])) == [
        "seal 1 is the first of its checkpoint, and starts with batch 3"
    ]


def test_what_is_no_seal_is_found() -> None:
    seals = texts(chain(2))
    (fault, *_) = chain_faults(["{}", seals[1]])
    assert fault.startswith("the seal at place 0 cannot be read")
