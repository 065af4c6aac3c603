"""The way from the engine's thread to bytes: mailbox, answers, and the folds of both formats."""

import asyncio
import json
import threading
from types import SimpleNamespace

import pytest
from attrs import evolve
from hypothesis import given
from hypothesis import strategies as st

from luce_core.contracts import (
    ChatTurn,
    ContentDelta,
    Done,
    Failure,
    Finish,
    Heartbeat,
    Logprobs,
    Progress,
    SamplingParams,
    TokenLogprob,
    Tokens,
)
from luce_core.errors import CapacityError
from luce_core.server import sse
from luce_core.server.answers import MAX_WAITING_BYTES
from luce_core.server.chat import ChatStream, ChunkWriter
from luce_core.server.completions import CompletionRequest, CompletionStream, CompletionWriter, Wanted
from luce_core.server.mailbox import BATCH, Mailbox
from luce_core.server.service import Generation, GenerationService, ModelFace
from luce_core.testing.toy_vocab import toy_vocabulary
from luce_core.text import Tokenizer
from luce_core.text.chat_formats import TagFormat, TaggedJson

TOKENIZER = Tokenizer.from_metadata(toy_vocabulary("bpe"))
USAGE = dict.fromkeys(
    ("prompt_tokens", "completion_tokens", "cached_tokens", "drafted_tokens", "accepted_tokens"), 1
)
TIMES = dict.fromkeys(("queue_ms", "prefill_ms", "decode_ms", "ttft_ms"), 1.0)


def ids(text):
    return tuple(TOKENIZER.encode(text))


def done(request, reason="length", error=None):
    return Done(request, reason, USAGE, TIMES, error=error)


class Channel:
    """Keeps what is submitted; the test plays the engine."""

    def __init__(self, room=100):
        self.room, self.requests, self.sinks, self.cancelled = room, [], [], []

    def submit(self, request, sink):
        if len(self.requests) >= self.room:
            raise CapacityError("full")
        self.requests.append(request.request)
        self.sinks.append(sink)

    def cancel(self, request):
        self.cancelled.append(request)

    def stats(self):
        return {}

    def send(self, index, event, *more):
        self.sinks[index](event(self.requests[index], *more))


def make_service(channel, heartbeat_s=None):
    face = ModelFace("toy", 10_000, TOKENIZER, None, 0)
    records = []
    service = GenerationService(channel, face, (records.append,), heartbeat_s)
    service.records = records
    return service


def wanted(**more):
    return Generation(prompt=(1, 2), params=SamplingParams(), **more)


async def settle():
    for _ in range(50):  # turns of the loop, each of which delivers a batch
        await asyncio.sleep(0)


@pytest.fixture(autouse=True)
def _no_pace(request, monkeypatch):
    """Turns of the loop are what these tests count."""
    monkeypatch.setattr("luce_core.server.mailbox.PACE_S", 0.0)


# --- mailbox


def test_what_many_threads_post_arrives_once_each_in_order():
    async def main():
        mail, got, finished = Mailbox(asyncio.get_running_loop()), [], asyncio.Event()

        def receive(event):
            got.append(event)
            if len(got) == 4000:
                finished.set()

        def post(thread):
            for number in range(1000):
                mail.post(receive, (thread, number))

        threads = [threading.Thread(target=post, args=(number,)) for number in range(4)]
        for thread in threads:
            thread.start()
        await finished.wait()
        for thread in threads:
            thread.join()
        await settle()
        assert len(got) == 4000
        for thread in range(4):
            assert [number for found, number in got if found == thread] == list(range(1000))

    asyncio.run(main())


def test_what_comes_within_the_pace_wakes_the_loop_once(monkeypatch):
    async def main():
        loop = asyncio.get_running_loop()
        mail, woken, later, got = Mailbox(loop), [], [], []
        wake = loop.call_soon_threadsafe
        monkeypatch.setattr(loop, "call_soon_threadsafe", lambda *args: woken.append(1) or wake(*args))
        monkeypatch.setattr(loop, "call_later", lambda delay, callback: later.append((delay, callback)))
        monkeypatch.setattr("luce_core.server.mailbox.PACE_S", 7.0)
        for number in range(50):
            mail.post(got.append, number)
        await settle()
        assert (len(woken), got) == (1, [*range(50)])
        mail.post(got.append, 50)  # the engine goes on
        await settle()
        ((delay, callback),) = later
        assert (len(woken), got[-1], delay) == (1, 49, 7.0)
        later.clear()
        callback()
        assert got[-1] == 50
        later.pop()[1]()  # nothing came: idle
        assert later == []
        mail.post(got.append, 51)
        await settle()
        assert (len(woken), got[-1]) == (2, 51)

    asyncio.run(main())


def test_an_engine_that_never_pauses_leaves_the_loop_its_turns():
    async def main():
        mail, got = Mailbox(asyncio.get_running_loop()), 0

        def receive(event):
            nonlocal got
            got += 1
            mail.post(receive, event)  # there is always one more

        for _ in range(3000):
            mail.post(receive, None)
        for turn in range(20):
            await asyncio.sleep(0)
            assert got <= turn * BATCH + BATCH
        assert got > 10 * BATCH

    asyncio.run(main())


def test_posting_to_a_loop_that_is_gone_says_so_every_time():
    loop = asyncio.new_event_loop()
    mail = Mailbox(loop)
    loop.close()
    for _ in range(2):
        with pytest.raises(RuntimeError):
            mail.post(print, None)


# --- answers


def test_text_that_waits_is_joined_and_the_order_of_choices_kept():
    async def main():
        channel = Channel()
        answers = make_service(channel).open([wanted(), wanted()])
        for word in ("a", "b", "c"):
            channel.send(0, Tokens, ids(word))
        channel.send(1, Tokens, ids("x"))
        channel.send(0, Tokens, ids("d"))
        await settle()
        assert await anext(answers) == [
            (0, ContentDelta("abc")),
            (1, ContentDelta("x")),
            (0, ContentDelta("d")),
        ]
        for index in (1, 0):
            channel.sinks[index](done(channel.requests[index]))
        batch = await anext(answers)
        assert [(index, event.reason) for index, event in batch] == [(1, "length"), (0, "length")]
        with pytest.raises(StopAsyncIteration):
            await anext(answers)
        answers.close()
        assert channel.cancelled == []

    asyncio.run(main())


@pytest.mark.parametrize("taken", [0, 1])
def test_closing_cancels_what_has_not_ended_once(taken):
    async def main():
        channel = Channel()
        service = make_service(channel)
        answers = service.open([wanted(), wanted(), wanted()])
        channel.sinks[1](done(channel.requests[1]))
        await settle()
        for _ in range(taken):
            await anext(answers)
        answers.close()
        answers.close()
        assert channel.cancelled == [channel.requests[0], channel.requests[2]]
        for index in (0, 2):
            channel.sinks[index](done(channel.requests[index], "cancelled"))
        await settle()
        assert [record.done.reason for record in service.records] == ["length", "cancelled", "cancelled"]

    asyncio.run(main())


def test_closing_wakes_whoever_waits():
    async def main():
        answers = make_service(Channel()).open([wanted()])
        waiting = asyncio.ensure_future(anext(answers, None))
        await settle()
        answers.close()
        assert await waiting is None

    asyncio.run(main())


def test_a_refused_choice_cancels_those_before_it():
    async def main():
        channel = Channel(room=2)
        with pytest.raises(CapacityError, match="full"):
            make_service(channel).open([wanted()] * 4)
        assert channel.cancelled == channel.requests
        assert len(channel.requests) == 2

    asyncio.run(main())


def test_a_stop_string_ends_its_request_although_nobody_reads():
    async def main():
        channel = Channel()
        service = make_service(channel)
        answers = service.open([wanted(stops=("cd",))])
        channel.send(0, Tokens, ids("abc"))
        await settle()
        assert channel.cancelled == []
        channel.send(0, Tokens, ids("def"))
        await settle()
        assert channel.cancelled == channel.requests
        channel.sinks[0](done(channel.requests[0], "cancelled"))
        await settle()
        text, finish = await anext(answers)
        assert text == (0, ContentDelta("ab"))
        assert finish[1].reason == "stop"
        assert [record.done.reason for record in service.records] == ["stop"]

    asyncio.run(main())


def test_a_reader_that_is_stuck_costs_bounded_memory_and_its_request():
    async def main():
        channel = Channel()
        answers = make_service(channel).open([wanted()])
        many = TokenLogprob(5, -1.0, tuple((token, -2.0) for token in range(20)))
        for _ in range(3 * MAX_WAITING_BYTES // 4000):
            channel.send(0, Tokens, ids("a"), (many,))
        await settle()
        assert set(channel.cancelled) == set(channel.requests)
        channel.sinks[0](done(channel.requests[0], "cancelled"))
        await settle()
        batch = await anext(answers)
        assert sum(isinstance(event, Logprobs) for _, event in batch) < 1.1 * MAX_WAITING_BYTES / 4000
        assert isinstance(batch[-1][1], Finish)

    asyncio.run(main())


def test_an_error_of_the_fold_reaches_the_reader():
    async def main():
        channel = Channel()
        answers = make_service(channel).open([wanted()])
        channel.send(0, Tokens, (10**9,))
        await settle()
        with pytest.raises(Exception, match="1000000000"):
            await anext(answers)
        answers.close()
        assert channel.cancelled == channel.requests

    asyncio.run(main())


def test_a_heartbeat_comes_only_while_somebody_waits_in_silence():
    async def main():
        channel = Channel()
        answers = make_service(channel, heartbeat_s=0.001).open([wanted()])
        assert await anext(answers) == [(0, Heartbeat("waiting"))]
        assert await anext(answers) == [(0, Heartbeat("waiting"))]
        channel.send(0, Progress, "prefill", 1, 2)
        found = []
        while Heartbeat("prefill", 1, 2) not in found:
            found += [event for _, event in await anext(answers)]
        answers.close()

    asyncio.run(main())


def test_tokens_that_say_nothing_yet_are_silence():
    async def main():
        channel = Channel()
        service = make_service(channel, heartbeat_s=1000)
        service.face = evolve(service.face, chat=TagFormat("t", None, (TaggedJson(),)))
        answers = service.open([wanted(turn=ChatTurn("", {"f": {}}))])
        answers._heard = -1.0
        channel.send(0, Tokens, ids("<tool_call>{"))
        await settle()
        assert answers._heard == -1.0
        channel.send(0, Tokens, ids(" no call"))
        await settle()
        assert answers._heard > 0
        assert [event for _, event in await anext(answers)] == [ContentDelta("<tool_call>{ no call")]
        answers.close()

    asyncio.run(main())


# --- folds to bytes

TEXT = st.text(max_size=8)
EVENTS = st.one_of(
    st.builds(ContentDelta, TEXT.filter(bool)),
    st.builds(Heartbeat, st.sampled_from(["queued", "prefill", "waiting"])),
    st.builds(lambda token: Logprobs((TokenLogprob(token, -1.5, ((token, -1.5),)),)), st.integers(0, 255)),
    st.builds(lambda reason: Finish(reason, USAGE, TIMES), st.sampled_from(["stop", "length", "cancelled"])),
    st.builds(lambda text: Failure(text, 500), TEXT),
)


def writer(kind, prefix):
    face = SimpleNamespace(id='m\0"odel', tokenizer=TOKENIZER)
    return kind(prefix, SimpleNamespace(face=face))


def chat_fold(count, usage):
    return ChatStream(writer(ChunkWriter, "chatcmpl"), count, usage)


def completion_fold(count, usage):
    body = CompletionRequest(prompt="a", n=count, logprobs=1, stream_options={"include_usage": usage})
    return CompletionStream(
        writer(CompletionWriter, "cmpl"), Wanted(body, [wanted()] * count, [None] * count)
    )


def said(choice):
    return choice["delta"].get("content") or "" if "delta" in choice else choice["text"]


@pytest.mark.parametrize("make", [chat_fold, completion_fold])
@given(count=st.integers(1, 3), usage=st.booleans(), data=st.data())
def test_every_choice_ends_once_whatever_comes(make, count, usage, data):
    fold = make(count, usage)
    raw, ended, texts, failed = fold.begin(), {}, [""] * count, False
    events = data.draw(st.lists(st.tuples(st.integers(0, count - 1), EVENTS), max_size=12))
    for index, event in [*events, *((index, Finish("length", USAGE, TIMES)) for index in range(count))]:
        if not failed and index not in ended:
            if isinstance(event, ContentDelta):
                texts[index] += event.text
            elif isinstance(event, Finish):
                ended[index] = event.reason
            elif isinstance(event, Failure):
                failed = True
                ended |= {choice: "error" for choice in range(count) if choice not in ended}
        raw += fold.feed(index, event)
    assert fold.over is failed
    raw += fold.end()

    events = raw.decode().split("\n\n")
    assert events[-2:] == ["data: [DONE]", ""]
    chunks = [json.loads(one.removeprefix("data: ")) for one in events[:-2] if not one.startswith(": ")]
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    for index in range(count):
        mine = [choice for choice in choices if choice["index"] == index]
        assert [choice["finish_reason"] for choice in mine if choice["finish_reason"]] == [ended[index]]
        assert mine[-1]["finish_reason"]
        assert "".join(said(choice) for choice in mine) == texts[index]
        if make is chat_fold:
            assert [choice["delta"].get("role") for choice in mine] == [
                "assistant",
                *[None] * (len(mine) - 1),
            ]
    assert [chunk for chunk in chunks if "error" in chunk] == chunks[-1:] * failed
    assert [chunk["choices"] for chunk in chunks if chunk.get("usage")] == [[]] * (usage and not failed)
    assert len({chunk["id"] for chunk in chunks}) == 1


@given(st.text(), st.text())
def test_text_data_is_what_json_writes(around, text):
    def make(one):
        return {"around": around, "deep": [{"text": one, "more": around}]}

    if around == sse.TextData.HOLE:
        return
    assert json.loads(sse.TextData(make)(text).removeprefix(b"data: ")) == make(text)
    assert sse.TextData(make)(text) == sse.data(make(text))
