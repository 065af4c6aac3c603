"""The conversation of `luce-core run` and its slash commands; knows no terminal and no engine."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

from attrs import Factory, define, evolve, frozen

from luce_core.contracts import SamplingParams
from luce_core.option_fields import parse_float, parse_int
from luce_core.paths import expand_home

Message = dict[str, str]


@frozen
class Reply:
    """What a line the user typed asks for."""

    text: str = ""
    """To show."""
    answer: bool = False
    """The model is to speak."""
    leave: bool = False


@frozen
class Setting:
    """One thing `/set` changes: the parameter it becomes and the values it takes."""

    param: str
    parse: Callable[[str], Any]
    low: float
    high: float


SETTINGS: Mapping[str, Setting] = {
    "temperature": Setting("temperature", parse_float, 0.0, 100.0),
    "top-p": Setting("top_p", parse_float, 0.0, 1.0),
    "top-k": Setting("top_k", parse_int, 0, 2**31 - 1),
    "min-p": Setting("min_p", parse_float, 0.0, 1.0),
    "repetition": Setting("repetition", parse_float, 0.01, 10.0),
    "seed": Setting("seed", parse_int, 0, 2**63 - 1),
}


@define
class Conversation:
    """Messages, system prompt and sampling parameters. `say` is the only way in."""

    params: SamplingParams
    system: str = ""
    messages: list[Message] = Factory(list)
    max_tokens: int | None = None
    seed: int | None = None
    stats: str = "No answer yet."

    COMMANDS: ClassVar[Mapping[str, str]] = {
        "/help": "this list",
        "/clear": "forget the conversation, keep the system prompt",
        "/system TEXT": "set the system prompt (without TEXT: show it; 'none' removes it)",
        "/regen": "answer the last question again",
        "/undo": "take the last question and its answer back",
        "/set NAME VALUE": f"change {', '.join(SETTINGS)} or max-tokens (without NAME: show them)",
        "/stats": "tokens and speed of the last answer",
        "/save FILE": "write the conversation as JSON",
        "/exit": "leave (so do /quit and Ctrl-D)",
    }

    def say(self, line: str) -> Reply:
        """What the user typed: a command, or a message the model is to answer."""
        text = line.strip()
        if not text:
            return Reply()
        if not line.startswith("/"):
            self.messages.append({"role": "user", "content": line})
            return Reply(answer=True)
        word, _, argument = text.partition(" ")
        known: dict[str, Callable[[str], Reply]] = {
            "/help": self._help, "/clear": self._clear, "/system": self._system, "/regen": self._regen,
            "/undo": self._undo, "/set": self._set, "/stats": lambda _: Reply(self.stats),
            "/save": self._save, "/exit": lambda _: Reply(leave=True), "/quit": lambda _: Reply(leave=True),
        }
        command = known.get(word)
        if command is None:
            return Reply(
                f"There is no command {word!r}; /help lists them. A message that begins with '/' needs a "
                "space before it."
            )
        return command(argument.strip())

    def asked(self) -> list[Message]:
        """The messages to answer."""
        return [{"role": "system", "content": self.system}, *self.messages] if self.system else self.messages

    def answered(self, text: str, reasoning: str = "") -> None:
        """Remember the model's answer, also one that was stopped."""
        message = {"role": "assistant", "content": text}
        self.messages.append({**message, "reasoning_content": reasoning} if reasoning else message)

    def take_back(self) -> None:
        """Drop the question that could not be answered."""
        if self.messages and self.messages[-1]["role"] == "user":
            self.messages.pop()

    def _help(self, _argument: str) -> Reply:
        width = max(map(len, self.COMMANDS))
        lines = [f"{name:{width}}  {what}" for name, what in self.COMMANDS.items()]
        keys = "Enter sends, Alt-Enter begins a new line, Ctrl-C stops an answer."
        return Reply("\n".join([*lines, keys]))

    def _clear(self, _argument: str) -> Reply:
        self.messages.clear()
        return Reply("The conversation is empty.")

    def _system(self, argument: str) -> Reply:
        if argument:
            self.system = "" if argument == "none" else argument
        return Reply(f"System prompt: {self.system or 'none'}")

    def _regen(self, _argument: str) -> Reply:
        if not any(message["role"] == "user" for message in self.messages):
            return Reply("There is no question yet.")
        while self.messages[-1]["role"] != "user":
            self.messages.pop()
        return Reply(answer=True)

    def _undo(self, _argument: str) -> Reply:
        if not any(message["role"] == "user" for message in self.messages):
            return Reply("There is nothing to take back.")
        while self.messages.pop()["role"] != "user":
            continue
        return Reply(f"{len(self.messages)} messages are left.")

    def _set(self, argument: str) -> Reply:
        name, _, text = argument.partition(" ")
        if not name:
            return Reply(self._settings())
        try:
            if name == "max-tokens":
                self.max_tokens = _within(parse_int(text), 1, 2**31 - 1)
            elif name == "seed":
                self.seed = _within(parse_int(text), 0, 2**63 - 1)
            elif name in SETTINGS:
                setting = SETTINGS[name]
                value = _within(setting.parse(text), setting.low, setting.high)
                self.params = evolve(self.params, **{setting.param: value})
            else:
                return Reply(f"There is no setting {name!r}. There are: {', '.join(SETTINGS)}, max-tokens.")
        except ValueError as error:
            return Reply(f"{name} cannot be {text!r}: {error}.")
        return Reply(self._settings())

    def _settings(self) -> str:
        shown = {
            name: getattr(self.params, setting.param) for name, setting in SETTINGS.items() if name != "seed"
        }
        shown["seed"] = "drawn anew for each answer" if self.seed is None else self.seed
        shown["max-tokens"] = "up to the context" if self.max_tokens is None else self.max_tokens
        return "\n".join(f"{name} {value}" for name, value in shown.items())

    def _save(self, argument: str) -> Reply:
        if not argument:
            return Reply("Say where: /save FILE")
        path = expand_home(argument)
        try:
            path.write_text(json.dumps(self.asked(), indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
        except OSError as error:
            return Reply(f"{argument!r} cannot be written: {error.strerror}.")
        return Reply(f"{len(self.asked())} messages written to {path}.")


def _within(value: Any, low: float, high: float) -> Any:
    if not low <= value <= high:
        raise ValueError(f"wanted {low:g} to {high:g}")
    return value
