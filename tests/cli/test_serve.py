"""`luce-core serve` as a program, with the toy model: banner, answers, rows, signals, refusals."""

import json
import re
import signal
import socket
import ssl
import subprocess
import sys
import threading
from contextlib import contextmanager

import httpx
import psutil
import pytest
import trustme

URL = re.compile(r"at (https?://\S+)/v1")


class Served:
    """A running server and the lines it printed; `line` waits for the next one that matches."""

    def __init__(self, argv, env, cwd):
        self.process = subprocess.Popen(
            [sys.executable, "-m", "luce_core", "serve", "--port", "0", *argv],
            env=env, cwd=cwd, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )
        self.lines = []
        self._watchdog = threading.Timer(120, self.process.kill)
        self._watchdog.start()

    def line(self, pattern):
        for line in self.process.stdout:
            self.lines.append(line.rstrip("\n"))
            if re.search(pattern, line):
                return line
        raise AssertionError(f"no {pattern!r} in:\n" + "\n".join(self.lines))

    def stop(self, number=signal.SIGTERM):
        self.process.send_signal(number)
        self.lines += self.process.stdout.read().splitlines()
        return self.process.wait()

    def close(self):
        self._watchdog.cancel()
        self.process.kill()
        self.process.stdout.close()
        self.process.wait()


@pytest.fixture
def served(toy, toy_model, environment, tmp_path):
    made = []

    def start(*argv, **extra):
        made.append(Served([str(toy_model), *map(str, argv)], environment(**extra), tmp_path))
        return made[-1]

    yield start
    for one in made:
        one.close()


TEXT = re.compile('"content":"[^"]')
"""A chunk with text: the first of an answer has a role and an empty text, before anything is computed."""

SLOW = """
from time import sleep
from luce_core.engine.scheduler import FairScheduler

class Slow(FairScheduler):
    def plan(self, *state):
        sleep(0.05)
        return super().plan(*state)

def make(context):
    return Slow(context.max_sequences)

@hookimpl
def luce_register_schedulers():
    return [PartSpec("scheduler", "slow", __name__ + ":make", Equivalence.BITS)]
"""
"""Steps so far apart that an answer up to the end of the context takes half a minute."""


@contextmanager
def running_stream(url):
    """The lines of an answer, from the one behind its first text on; far from its end."""
    messages = [{"role": "user", "content": "x"}]
    # greedy: one sampled answer in a hundred is a thought to its end
    body = {"messages": messages, "stream": True, "ignore_eos": True, "temperature": 0}
    with httpx.stream("POST", f"{url}/v1/chat/completions", json=body, timeout=60) as stream:
        lines = (line for line in stream.iter_lines() if line)
        while not TEXT.search(next(lines)):
            pass
        yield lines


def chat(url, **more):
    body = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 5, "temperature": 0, **more}
    return httpx.post(f"{url}/v1/chat/completions", json=body, timeout=60)


def test_banner_answer_row_and_a_clean_end(served):
    server = served("-c", "256")
    url = URL.search(server.line(URL.pattern))[1]
    banner = "\n".join(server.lines)
    for word in ("toy.gguf", "on cpu", "context 256", "luce-toy 1.0", "same bits", "weights", "total"):
        assert word in banner
    assert "uvicorn" not in banner
    assert "\x1b" not in banner  # nobody watches: no colours, no moving lines
    answer = chat(url)
    assert answer.status_code == 200, answer.text
    usage = answer.json()["usage"]
    header = server.line("TTFT")
    row = server.line("chat")
    assert row.split()[1:3] == ["chat", str(usage["prompt_tokens"])]
    assert row.split()[-1] in ("length", "stop")
    assert header.index("finish") == row.index(row.split()[-1])
    assert server.stop() == 0
    assert server.lines[-1] == "Stopped."


def test_one_row_per_request_also_for_one_that_is_streamed(served):
    server = served()
    url = URL.search(server.line(URL.pattern))[1]
    streamed = chat(url, stream=True)
    events = [line for line in streamed.text.splitlines() if line.startswith("data: ")]
    assert events[-1] == "data: [DONE]"
    assert len(events) > 3
    assert chat(url).status_code == 200
    server.line("chat")
    server.line("chat")
    assert server.stop(signal.SIGINT) == 0
    assert sum(" chat " in line for line in server.lines) == 2


def test_the_name_clients_see(served):
    server = served("--alias", "my-model")
    url = URL.search(server.line(URL.pattern))[1]
    assert httpx.get(f"{url}/v1/models").json()["data"][0]["id"] == "my-model"
    assert "my-model" in server.lines[-1]


def test_keys_are_asked_for(served):
    server = served(LUCE_API_KEY="open-sesame")
    url = URL.search(server.line(URL.pattern))[1]
    assert chat(url).status_code == 401
    assert "open-sesame" not in "\n".join(server.lines)


def test_https_with_client_certificates_and_a_renewal(served, tmp_path):
    """Client certificates guard an open address; the banner says https; new files need no restart."""
    authority = trustme.CA()
    certificate, key, clients = tmp_path / "cert.pem", tmp_path / "key.pem", tmp_path / "clients.pem"
    authority.cert_pem.write_to_path(clients)

    def renew():
        made = authority.issue_cert("127.0.0.1")
        key.write_bytes(made.private_key_pem.bytes())
        certificate.write_bytes(made.cert_chain_pems[0].bytes())
        return ssl.PEM_cert_to_DER_cert(certificate.read_text())

    def shown():
        with (
            socket.create_connection(("127.0.0.1", port), timeout=60) as raw,
            context.wrap_socket(raw, server_hostname="127.0.0.1") as connection,
        ):
            return connection.getpeercert(binary_form=True)

    first = renew()
    server = served(
        "--host", "0.0.0.0", "--tls-cert", certificate, "--tls-key", key, "--tls-client-ca", clients
    )
    port = int(re.search(r"at https://0\.0\.0\.0:(\d+)/v1", server.line(URL.pattern))[1])
    context = ssl.create_default_context()
    authority.configure_trust(context)
    with pytest.raises(httpx.TransportError):
        httpx.get(f"https://127.0.0.1:{port}/health", verify=context, timeout=60)
    authority.issue_cert("agent@example.org").configure_cert(context)
    answer = httpx.get(f"https://127.0.0.1:{port}/health", verify=context, timeout=60)
    assert answer.json()["status"] == "ok"
    assert "server" not in answer.headers
    assert shown() == first
    second = renew()
    assert shown() == second != first
    assert server.stop() == 0


def test_insecure_says_so(served):
    server = served("--host", "0.0.0.0", "--insecure")
    server.line(URL.pattern)
    assert any(line.startswith("Warning: everyone who reaches 0.0.0.0") for line in server.lines)


def test_a_chat_template_file_replaces_the_files_own(served, tmp_path):
    (tmp_path / "t.jinja").write_text("{{ raise_exception('no ' + messages[0]['content']) }}")
    server = served("--chat-template-file", tmp_path / "t.jinja")
    url = URL.search(server.line(URL.pattern))[1]
    answer = chat(url)
    assert answer.status_code == 400
    assert "no hello" in answer.text


def test_a_taken_port_is_a_sentence_before_anything_is_loaded(luce, toy, toy_model, monkeypatch):
    monkeypatch.setattr("luce_core.cli.starting.start", lambda *_: pytest.fail("loaded for nothing"))
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        wrong = luce("serve", toy_model, "--port", port)
    assert wrong.status == 2
    assert f"Cannot listen on 127.0.0.1:{port}" in wrong.err
    assert wrong.err.count("\n") == 1


def test_an_absent_plugin_is_a_sentence(luce, toy_model):
    wrong = luce("serve", toy_model, "--port", "0")
    assert wrong.status == 1
    assert "pip install luce-arch-toy" in wrong.err
    assert "Traceback" not in wrong.err


def test_a_stream_that_runs_when_the_server_is_stopped_ends_well(served):
    """Drained or cancelled, but not cut: the client sees the end of the stream."""
    server = served("--drain", "10")
    url = URL.search(server.line(URL.pattern))[1]
    body = {"messages": [{"role": "user", "content": "x"}], "stream": True, "max_tokens": 200}
    with httpx.stream("POST", f"{url}/v1/chat/completions", json=body, timeout=60) as stream:
        lines = stream.iter_lines()
        first = next(lines)
        server.process.send_signal(signal.SIGTERM)
        rest = [line for line in lines if line]
    assert json.loads(first.removeprefix("data: "))["object"] == "chat.completion.chunk"
    assert rest[-1] == "data: [DONE]"
    assert server.process.wait() == 0


@pytest.mark.parametrize("where", ["--engine-process", "--no-engine-process"])
def test_a_stream_that_is_not_over_when_the_drain_is_says_so(served, toy, where):
    toy.write("slow", SLOW)
    server = served("--drain", "0", "--scheduler", "slow", where)
    with running_stream(URL.search(server.line(URL.pattern))[1]) as lines:
        server.process.send_signal(signal.SIGTERM)
        *_, last, end = lines
    assert json.loads(last.removeprefix("data: "))["choices"][0]["finish_reason"] == "cancelled"
    assert end == "data: [DONE]"
    assert server.stop() == 0
    assert server.lines[-1] == "Stopped."


@pytest.mark.parametrize("where", ["--engine-process", "--no-engine-process"])
def test_the_engine_is_where_it_was_asked_to_be(served, where):
    server = served(where)
    url = URL.search(server.line(URL.pattern))[1]
    children = psutil.Process(server.process.pid).children()
    assert len(children) == (where == "--engine-process")
    assert chat(url).status_code == 200
    assert httpx.get(f"{url}/health").json()["status"] == "ok"
    assert server.stop() == 0
    assert not any(child.is_running() for child in children)


def test_a_killed_engine_ends_its_streams_with_an_error_and_answers_again(served, toy):
    toy.write("slow", SLOW)
    server = served("--scheduler", "slow")
    url = URL.search(server.line(URL.pattern))[1]
    expected = chat(url).json()["choices"]
    with running_stream(url) as lines:
        (engine,) = psutil.Process(server.process.pid).children()
        engine.kill()
        *_, error, end = lines
    assert end == "data: [DONE]"
    message = json.loads(error.removeprefix("data: "))["error"]["message"]
    assert "SIGKILL" in message
    assert "Send the request again" in message
    server.line("The engine answers again")
    assert chat(url).json()["choices"] == expected
    health = httpx.get(f"{url}/health").json()
    assert (health["status"], health["restarts"]) == ("ok", 1)
    assert "luce_engine_restarts_total 1.0" in httpx.get(f"{url}/metrics").text
    assert server.stop() == 0


SAD = """
def make(context):
    raise RuntimeError("no mood today")

@hookimpl
def luce_register_schedulers():
    return [PartSpec("scheduler", "sad", __name__ + ":make", Equivalence.BITS)]
"""


@pytest.mark.parametrize("where", ["--engine-process", "--no-engine-process"])
def test_an_engine_that_cannot_be_built_ends_the_server_with_its_reason(served, toy, where):
    toy.write("sad", SAD)
    server = served("--scheduler", "sad", where)
    assert server.process.wait() == 1
    said = server.process.stdout.read()
    assert "no mood today" in said
    assert "'sad'" in said
    assert "Serving" not in said
