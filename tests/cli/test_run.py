"""`luce-core run` as a program: one answer through a pipe, and a chat on a pseudo-terminal."""

import os
import pty
import re
import select
import subprocess
import sys
import time

import pytest

from luce_core.gguf import read_header
from luce_core.testing.toy import ToyLaw, write_toy_model
from luce_core.text import ChatTemplate, Tokenizer, normalize_messages

ESCAPES = re.compile(r"\x1b\[[0-9;?]*[a-zA-Z]|\x1b[=>]|\r")
PATIENCE_S = 60
CONTROLLED = """
import fcntl, os, sys, termios
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
os.execv(sys.argv[1], sys.argv[1:])
"""
"""Makes the terminal the program's own, so that Ctrl-C on it is a signal."""


class Terminal:
    """A program on a pseudo-terminal: `type` keys, `until` a text appears."""

    def __init__(self, argv, env, cwd):
        self.master, slave = pty.openpty()
        self.process = subprocess.Popen(
            [sys.executable, "-c", CONTROLLED, *argv], env=env, cwd=cwd,
            stdin=slave, stdout=slave, stderr=slave, start_new_session=True,
        )
        os.close(slave)
        self.screen = ""

    def type(self, keys):
        os.write(self.master, keys.encode())

    def until(self, pattern):
        """Wait for `pattern` in what came since the last match; returns that piece of the screen."""
        deadline = time.monotonic() + PATIENCE_S
        while True:
            found = re.search(pattern, self.screen)
            if found:
                seen, self.screen = self.screen[: found.end()], self.screen[found.end() :]
                return seen
            ready, _, _ = select.select([self.master], [], [], max(0, deadline - time.monotonic()))
            if not ready:
                raise AssertionError(f"no {pattern!r} within {PATIENCE_S} s in:\n{self.screen}")
            try:
                data = os.read(self.master, 65536)
            except OSError:  # Linux says EIO when the program is gone
                data = b""
            if not data:
                raise AssertionError(f"the program ended before {pattern!r}:\n{self.screen}")
            if b"\x1b[6n" in data:  # the line editor asks where the cursor is
                self.type("\x1b[1;1R")
            self.screen += ESCAPES.sub("", data.decode(errors="replace"))

    def ready(self):
        """Wait for the prompt: what is typed before it is there goes to the terminal, not to the program."""
        self.until(">")

    def end(self):
        """The exit status; reads what is left so that the program does not block."""
        deadline = time.monotonic() + PATIENCE_S
        while self.process.poll() is None and time.monotonic() < deadline:
            ready, _, _ = select.select([self.master], [], [], 0.1)
            if ready:
                try:
                    self.screen += ESCAPES.sub("", os.read(self.master, 65536).decode(errors="replace"))
                except OSError:
                    break
        return self.process.wait(10)

    def close(self):
        self.process.kill()
        self.process.wait()
        os.close(self.master)


@pytest.fixture
def terminal(toy, environment, tmp_path):
    made = []

    def start(model, *argv):
        command = [sys.executable, "-m", "luce_core", "run", str(model), *map(str, argv)]
        made.append(Terminal(command, environment(), tmp_path))
        made[-1].until(r"/help lists commands\.")
        made[-1].ready()
        return made[-1]

    yield start
    for one in made:
        one.close()


def test_one_answer_through_a_pipe_is_text_and_nothing_else(toy, program, toy_model):
    options = ("--temperature", "0", "--max-tokens", "12")
    asked = program("run", toy_model, "--prompt", "hello", *options)
    assert asked.status == 0, asked.err
    assert asked.out.endswith("\n")
    assert len(asked.out) > 1
    piped = program("run", toy_model, *options, stdin="hello")
    assert piped.out == asked.out
    other = program("run", toy_model, *options, stdin="hello!")
    assert other.out != asked.out


def test_a_question_longer_than_the_context_is_a_sentence(toy, program, tmp_path):
    model = write_toy_model(tmp_path / "short.gguf", context=64)
    wrong = program("run", model, stdin="x" * 500)
    assert wrong.status == 1
    assert "maximum context length is 64 tokens" in wrong.err
    assert "Traceback" not in wrong.err


def test_a_chat_answers_remembers_and_leaves(terminal, toy_model):
    talk = terminal(toy_model, "--temperature", "0", "--max-tokens", "8")
    talk.type("hello\r")
    first = talk.until(r"\(\d+ tokens.*\)")
    talk.ready()
    talk.type("/regen\r")
    again = talk.until(r"\(\d+ tokens.*\)")
    answer = first.rpartition("hello\n")[2].rpartition("(")[0].strip()
    assert answer
    assert again.rpartition("/regen\n")[2].rpartition("(")[0].strip() == answer
    talk.ready()
    talk.type("/undo\r")
    talk.until("0 messages are left")
    talk.ready()
    talk.type("/help\r")
    talk.until("/system TEXT")
    talk.until("Ctrl-C stops an answer")
    talk.ready()
    talk.type("/exit\r")
    assert talk.end() == 0


def test_alt_enter_begins_a_new_line(terminal, toy_model, tmp_path):
    talk = terminal(toy_model, "--max-tokens", "2", "--temperature", "0")
    talk.type("one\x1b\rtwo\r")
    talk.until(r"\(\d+ tokens.*\)")
    talk.ready()
    talk.type("/save talk.json\r")
    talk.until("messages written")
    talk.ready()
    assert '"one\\ntwo"' in (tmp_path / "talk.json").read_text()
    talk.type("\x04")
    assert talk.end() == 0


LONG_SALT = 274
"""Found by trying: a toy that answers "go" with more than 500 tokens, so that there is time to stop it."""


def test_the_long_answer_is_long(tmp_path):
    metadata = read_header(write_toy_model(tmp_path / "long.gguf", salt=LONG_SALT)).metadata
    tokenizer = Tokenizer.from_metadata(metadata)
    asked = normalize_messages([{"role": "user", "content": "go"}])
    prompt = tokenizer.encode_segments(ChatTemplate.from_metadata(metadata).render(asked, kwargs={}))
    law = ToyLaw(tokenizer.vocab_size, LONG_SALT)
    assert len(law.greedy(prompt, 500, tokenizer.eog)) == 500


def test_ctrl_c_stops_the_answer_not_the_program(terminal, tmp_path):
    model = write_toy_model(tmp_path / "long.gguf", salt=LONG_SALT, context=4000)
    talk = terminal(model, "--temperature", "0")
    talk.type("go\r")
    talk.until("go\n+[^\n]+")  # some of the answer is there
    talk.type("\x03")  # now a signal
    talk.until("Stopped")
    talk.ready()
    talk.type("\x03")  # at the prompt it is a key
    talk.until("Ctrl-D or /exit leaves")
    talk.ready()
    talk.type("/undo\r")
    talk.until("0 messages are left")  # the piece of an answer was kept with its question
    talk.ready()
    talk.type("/exit\r")
    assert talk.end() == 0


def test_typed_lines_are_kept_privately_for_the_next_run(terminal, toy_model, tmp_path):
    talk = terminal(toy_model)
    talk.type("/stats\r")
    talk.until("No answer yet")
    talk.ready()
    talk.type("\x04")
    assert talk.end() == 0
    kept = tmp_path / "state" / "luce-core" / "history"
    assert "/stats" in kept.read_text()
    assert kept.stat().st_mode & 0o077 == 0


def test_an_answer_cannot_steer_the_terminal():
    from luce_core.cli.run import _Writer

    written = []
    writer = _Writer(written.append, watched=True)
    writer.content("a\x1b[2Jb\x07\x9b1mc\n\td")
    assert "".join(written) == "a␛[2Jb␇\ufffd1mc\n\td"
