"""`luce-core run`: chat in the terminal, over the same events the server streams."""

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import Callable
from contextlib import aclosing
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from luce_core.cli import flags
from luce_core.cli.console import say, warn
from luce_core.cli.conversation import Conversation
from luce_core.cli.rows import decode_speed
from luce_core.cli.session import Session
from luce_core.contracts import ContentDelta, Done, Failure, Finish, ReasoningDelta
from luce_core.errors import EngineError, LuceError

if TYPE_CHECKING:
    from prompt_toolkit import PromptSession

    from luce_core.server.service import GenerationService

CONTROL = {code: 0x2400 + code for code in range(32) if chr(code) not in "\n\t"} | {0x7F: 0x2421}
CONTROL |= dict.fromkeys(range(0x80, 0xA0), 0xFFFD)
"""Control characters a model may print -> visible ones: an answer must not steer the terminal."""
DIM, PLAIN = "\x1b[2m", "\x1b[0m"


def make(session: Session) -> click.Command:
    """The command."""
    params: list[click.Parameter] = [
        flags.model_argument(),
        click.Option(["--prompt", "-p"], metavar="TEXT", help="Answer this on standard output and leave."),
    ]
    text = (
        "Chat with a model in the terminal. MODEL is a GGUF file or a name `luce-core pull` lists. Without a "
        "terminal, or with --prompt, one answer goes to standard output."
    )
    return flags.command("run", session, run, text, params)


def run(session: Session, params: dict[str, Any]) -> None:
    """Plan, load, chat, end."""
    from luce_core.cli.starting import plan_model, start
    from luce_core.logs import set_up_logging

    prompt = params.pop("prompt")
    options = session.options(params)
    set_up_logging("warning" if options.core.log_level == "info" else options.core.log_level)
    planned = plan_model(session, options)
    interactive = prompt is None and sys.stdin.isatty() and sys.stdout.isatty()
    question = prompt if interactive or prompt is not None else sys.stdin.read()
    running = start(session, options, planned)
    try:
        if interactive:
            device = planned.plan.models[0].layer_device[0]
            context = planned.plan.number("context")
            say(f"{planned.name} on {device}, context {context:,} tokens. /help lists commands.")
            asyncio.run(_chat(running.service, _history(session)))
        else:
            asyncio.run(_answer_once(running.service, question))
    finally:
        running.close(0.0)


def _history(session: Session) -> Path:
    """Where typed lines are kept between runs."""
    base = session.env.get("XDG_STATE_HOME", "")
    root = Path(base) if base.startswith("/") else Path.home() / ".local" / "state"
    return root / "luce-core" / "history"


def _conversation(service: GenerationService) -> Conversation:
    return Conversation(service.face.defaults, max_tokens=service.face.max_tokens)


async def _answer_once(service: GenerationService, question: str) -> None:
    conversation = _conversation(service)
    conversation.messages.append({"role": "user", "content": question})
    writer = _Writer(sys.stdout.write, watched=False)
    await _Answer(service, conversation, writer).make()
    writer.end()


async def _chat(service: GenerationService, history: Path) -> None:
    conversation = _conversation(service)
    line = _prompt_session(conversation, history)
    while True:
        try:
            typed = await line.prompt_async("> ")
        except KeyboardInterrupt:
            say("Ctrl-D or /exit leaves.")
            continue
        except EOFError:
            return
        reply = conversation.say(typed)
        if reply.text:
            say(reply.text)
        if reply.leave:
            return
        if reply.answer:
            await _answer(service, conversation)


async def _answer(service: GenerationService, conversation: Conversation) -> None:
    """One answer; Ctrl-C stops it and it alone."""
    writer = _Writer(sys.stdout.write, watched=True)
    answer = _Answer(service, conversation, writer)
    task = asyncio.ensure_future(answer.make())

    def stop() -> None:
        answer.stopped = True
        task.cancel()

    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGINT, stop)
    try:
        await task
    except asyncio.CancelledError:
        writer.end()
        say("Stopped.")
    except LuceError as error:
        writer.end()
        conversation.take_back()
        warn(str(error))
    else:
        writer.end()
        writer.note(conversation.stats)
    finally:
        loop.remove_signal_handler(signal.SIGINT)


class _Writer:
    """Shows an answer as it comes. watched: thoughts too, dimmed, and nothing steers the terminal."""

    def __init__(self, write: Callable[[str], object], *, watched: bool) -> None:
        self._write = write
        self._watched = watched
        self._dim = False
        self._fresh = True

    def content(self, text: str) -> None:
        if self._watched:
            self._dimmed(False)
            text = text.translate(CONTROL)
        self._put(text)

    def reasoning(self, text: str) -> None:
        if self._watched:
            self._dimmed(True)
            self._put(text.translate(CONTROL))

    def note(self, text: str) -> None:
        """A line about the answer."""
        self._write(f"{DIM}({text}){PLAIN}\n")
        sys.stdout.flush()

    def end(self) -> None:
        """Finish the line."""
        self._dimmed(False)
        if not self._fresh:
            self._put("\n")

    def _dimmed(self, dim: bool) -> None:
        if dim != self._dim:
            self._dim = dim
            self._put(DIM if dim else f"{PLAIN}\n")

    def _put(self, text: str) -> None:
        self._write(text)
        sys.stdout.flush()
        self._fresh = text.endswith("\n")


class _Answer:
    """Makes one answer to the conversation and remembers it, also if it is cut short."""

    def __init__(self, service: GenerationService, conversation: Conversation, writer: _Writer) -> None:
        self.service = service
        self.conversation = conversation
        self.writer = writer
        self.stopped = False
        """Cancelling alone may be lost: `asyncio.wait_for` of Python 3.11 swallows it when data is there."""

    async def make(self) -> None:
        """Raises RequestError or EngineError when there is no answer."""
        from luce_core.server.service import Generation, seeded

        talk = self.conversation
        prompt = await asyncio.to_thread(self.service.chat, talk.asked())
        params = seeded(talk.params, talk.seed)
        wanted = Generation(prompt.ids, params, talk.max_tokens, api="run", turn=prompt.turn)
        content: list[str] = []
        reasoning: list[str] = []
        try:
            async with aclosing(self.service.generate(wanted)) as events:  # type: ignore[type-var]
                async for event in events:
                    if self.stopped:
                        raise asyncio.CancelledError
                    self._take(event, content, reasoning)
        finally:
            if content or reasoning:
                talk.answered("".join(content), "".join(reasoning))

    def _take(self, event: object, content: list[str], reasoning: list[str]) -> None:
        match event:
            case ContentDelta(text):
                content.append(text)
                self.writer.content(text)
            case ReasoningDelta(text):
                reasoning.append(text)
                self.writer.reasoning(text)
            case Finish():
                self.conversation.stats = _stats(event)
            case Failure(message):
                raise EngineError(message)


def _stats(finish: Finish) -> str:
    done = Done("", "stop", finish.usage, finish.timings)
    speed = decode_speed(done)
    parts = [f"{finish.usage['completion_tokens']} tokens"]
    if speed is not None:
        parts.append(f"{speed:.1f} tokens/s")
    if finish.timings.get("ttft_ms"):
        parts.append(f"first after {finish.timings['ttft_ms'] / 1e3:.2f} s")
    if finish.reason != "stop":
        parts.append(f"ended by {finish.reason}")
    return ", ".join((*parts, *finish.aside))


def _prompt_session(conversation: Conversation, history: Path) -> PromptSession[str]:
    """The line editor: Enter sends, Alt-Enter begins a new line, Tab completes commands."""
    from prompt_toolkit import PromptSession
    from prompt_toolkit.completion import WordCompleter
    from prompt_toolkit.history import FileHistory, InMemoryHistory
    from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent

    keys = KeyBindings()

    @keys.add("enter")
    def _send(event: KeyPressEvent) -> None:
        event.current_buffer.validate_and_handle()

    @keys.add("escape", "enter")
    def _new_line(event: KeyPressEvent) -> None:
        event.current_buffer.insert_text("\n")

    try:
        history.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        history.touch(0o600)
    except OSError as error:
        warn(f"What you type is not kept: {history} cannot be written ({error.strerror}).")
        kept: FileHistory | InMemoryHistory = InMemoryHistory()
    else:
        kept = FileHistory(str(history))
    words = [name.split(" ")[0] for name in conversation.COMMANDS]
    return PromptSession(
        history=kept,
        multiline=True,
        key_bindings=keys,
        completer=WordCompleter(words, sentence=True),
        complete_while_typing=False,
        prompt_continuation="  ",
    )
