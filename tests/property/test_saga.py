"""Sagas with random steps, outcomes and kills, in memory: what `next_of` makes of them."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from delivered.patterns.saga import NO_UNDO, Call, Saga, Status, Step, Verb
from delivered.patterns.saga.definition import Entry, Event, next_of

OUTCOMES = {
    Verb.DO: [Event.DONE, Event.DONE, Event.FAILED, Event.REJECTED, None],
    Verb.ASK: [Event.DONE, Event.NOT_DONE, Event.FAILED, None],
    Verb.UNDO: [Event.DONE, Event.DONE, Event.FAILED, None],
}
"""None: killed in the call."""


def nothing(call: Call) -> None:
    """A step's function."""


@st.composite
def sagas(draw: st.DrawFn) -> Saga:
    kinds = draw(st.lists(st.tuples(st.booleans(), st.booleans(), st.booleans()), min_size=1, max_size=5))
    return Saga(
        "s",
        [
            Step(f"{at}", nothing, undo=nothing if undo else NO_UNDO, takes_key=key, ask=nothing if ask else None,
                 attempts_max=2)
            for at, (undo, key, ask) in enumerate(kinds)
        ],
    )  # fmt: skip


@settings(max_examples=1_000)
@given(sagas(), st.data())
def test_every_saga_comes_to_rest_and_none_is_half_done(saga: Saga, data: st.DataObject) -> None:
    entries: list[Entry] = []
    effects: dict[str, int] = {}
    undone: list[str] = []
    calls: dict[str, int] = {}
    for _ in range(len(saga.steps) * 20):
        status, next_ = next_of(saga, entries)
        if next_ is None:
            break
        assert not status.at_rest
        step, verb = next_.step, next_.verb
        outcomes = OUTCOMES[verb]
        if verb is Verb.ASK:  # it tells the truth, if it answers
            outcomes = [Event.DONE if effects.get(step.name) else Event.NOT_DONE, Event.FAILED, None]
        entries.append(Entry(step.name, verb, Event.STARTED))
        event = data.draw(st.sampled_from(outcomes))
        took_effect = event is Event.DONE or (event in (Event.FAILED, None) and data.draw(st.booleans()))
        if verb is Verb.DO:
            assert not undone, "never forward again"
            calls[step.name] = calls.get(step.name, 0) + 1
            effects[step.name] = max(effects.get(step.name, 0), 1) if step.takes_key and took_effect else (
                effects.get(step.name, 0) + took_effect)  # fmt: skip
        elif verb is Verb.UNDO:
            if step.name not in undone:
                undone.append(step.name)
            if took_effect:
                effects[step.name] = 0
        if event is not None:
            entries.append(Entry(step.name, verb, event))
    status, next_ = next_of(saga, entries)
    assert next_ is None, "it ends"
    assert undone == sorted(undone, reverse=True)
    for step in saga.steps:
        assert effects.get(step.name, 0) <= 1, "twice only where the step may be repeated"
        assert step.takes_key or step.ask is not None or calls.get(step.name, 0) <= 1
        if status is Status.COMPLETE:
            assert effects[step.name] == 1
        if status is Status.COMPENSATED and step.undo is not NO_UNDO:
            assert effects.get(step.name, 0) == 0
