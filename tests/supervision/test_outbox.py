"""What the engine's process sends: everything, in order, with tokens that wait together as one event."""

from __future__ import annotations

from multiprocessing import Pipe

from luce_core.contracts import Done, EngineEvent, Progress, Tokens
from luce_core.supervision.messages import Events
from luce_core.supervision.worker import Outbox


def test_tokens_come_in_order_and_before_what_ended_them() -> None:
    ours, theirs = Pipe()
    with ours, theirs:
        outbox = Outbox(theirs)
        sent: list[EngineEvent] = [Progress("a", "prefill", 0, 3)]
        sent += [Tokens("ab"[token % 7 == 0], (token,)) for token in range(500)]
        sent += [Done("a", "length", {}, {}), Done("b", "length", {}, {})]
        for event in sent:
            outbox.event(event)
        came: list[EngineEvent] = []
        while not came or came[-1] != sent[-1]:
            report = ours.recv()
            assert isinstance(report, Events)
            came += report.events
    for name in "ab":
        ids = [
            token
            for event in came
            if isinstance(event, Tokens) and event.request == name
            for token in event.ids
        ]
        assert ids == [
            token
            for event in sent
            if isinstance(event, Tokens) and event.request == name
            for token in event.ids
        ]
    assert came[0] == sent[0]
    assert came[-2:] == sent[-2:]
    assert len(came) < len(sent), "tokens next to each other were not joined"
