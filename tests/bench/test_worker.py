"""Workers that answer, die, talk nonsense; and llama.cpp's, over a library that only pretends."""

import os
import signal
import stat
import sys

import pytest

from luce_core.bench.cases import Case, Prompt
from luce_core.bench.peer import SCRIPT, file_identity, start_llama_cpp
from luce_core.bench.worker import Worker
from luce_core.errors import EngineError, UsageError

from .fake_llama import write_fake_python

ECHO = """
import json, os, signal, sys
print(json.dumps({"engine": "echo"}), flush=True)
for line in sys.stdin:
    asked = json.loads(line)
    if asked["do"] == "die":
        print("the last words", file=sys.stderr, flush=True)
        sys.exit(3)
    if asked["do"] == "kill":
        os.kill(os.getpid(), getattr(signal, asked["name"]))
    print("what?" if asked["do"] == "babble" else json.dumps(asked), flush=True)
"""


def worker(source=ECHO, **more):
    return Worker("the echo", [sys.executable, "-c", source], **more)


@pytest.fixture
def echo():
    made = worker(hints={signal.SIGILL: "Try another."})
    yield made
    made.close()


def test_it_says_what_it_is_and_answers(echo):
    assert echo.about == {"engine": "echo"}
    assert echo.ask("say", words=[1, "zwei"]) == {"do": "say", "words": [1, "zwei"]}
    echo.close()
    echo.close()


def test_one_that_ends_is_named_with_status_and_last_words(echo):
    with pytest.raises(EngineError, match=r"the echo ended with status 3 when asked to die\. the last words"):
        echo.ask("die")


@pytest.mark.parametrize(("name", "said"), [("SIGILL", "SIGILL .* Try another."), ("SIGTERM", "SIGTERM")])
def test_one_that_is_killed_is_named_with_the_signal_and_the_way_out(echo, name, said):
    with pytest.raises(EngineError, match=rf"the echo was ended by {said}"):
        echo.ask("kill", name=name)


def test_nonsense_is_an_error(echo):
    with pytest.raises(EngineError, match=r"said 'what\?' when asked to babble, wanted JSON"):
        echo.ask("babble")


def test_one_that_never_starts():
    with pytest.raises(EngineError, match=r"ended with status 1 when started. .*nonsense"):
        worker("raise SystemExit('nonsense')")
    with pytest.raises(UsageError, match=r"'/no/such/python'.*No such file"):
        Worker("x", ["/no/such/python"])


def test_this_pythons_paths_are_not_passed_on(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", "/somewhere")
    source = "import json, os; print(json.dumps(os.environ.get('PYTHONPATH')))"
    for keep in (False, True):
        made = worker(source, keep_env=keep)
        assert made.about == ("/somewhere" if keep else None)
        made.close()


# --- llama.cpp


@pytest.fixture
def model(tmp_path):
    path = tmp_path / "model.gguf"
    path.write_bytes(b"weights")
    return path


ASKED = {"threads": 2, "k_type": "f16", "v_type": "bf16", "context": 512, "chunk": 8}


@pytest.fixture
def llama(tmp_path, model):
    made = start_llama_cpp(write_fake_python(tmp_path), model, repack=False, **ASKED)
    yield made
    made.close()


def test_its_conditions_are_those_of_its_own_process(llama, model):
    conditions = llama.conditions
    assert conditions.file == file_identity(model)
    assert (conditions.threads, conditions.context) == (2, 512)
    assert (conditions.k_type, conditions.v_type) == ("f16", "bf16")
    assert conditions.flash_attention
    assert llama.name == "llama-cpp-python 0.0.fake"
    assert llama.worker.about["repack"] is False
    assert llama.worker.about["chunk"] == 8
    assert llama.memory() > 1 << 20


def test_it_is_fed_what_the_test_says_and_keeps_a_context(llama):
    calls = llama.worker.ask
    prompt = Prompt(tuple(range(10)), tuple(range(100, 120)))
    sample = llama.sample(Case("pp", 20, 10, 1), prompt)
    assert sample.tokens == 20
    assert sample.seconds > 0
    first = calls("fake_log")
    assert [call[1] for call in first if call[0] == "decode"] == [
        list(range(8)),
        [8, 9],  # the context, in chunks of 8
        list(range(100, 108)),
        list(range(108, 116)),
        list(range(116, 120)),
    ]
    llama.sample(Case("tg", 3, 10, 1), Prompt(tuple(range(10))))
    second = calls("fake_log")[len(first) :]
    assert second[0] == ["keep", 10]  # cut back, not computed again
    assert [call[1] for call in second if call[0] == "decode"] == [
        [9],
        [10],
        [11],
    ]  # greedy: the fake says n + 1
    llama.sample(Case("pp", 2, 0, 1), Prompt((), (5, 6)))
    third = calls("fake_log")[len(first) + len(second) :]
    assert third == [["clear"], ["decode", [5, 6]]]


def test_a_memory_that_cannot_be_cut_back_is_filled_again(llama):
    llama.worker.ask("fake_stubborn")
    for _ in range(2):
        llama.sample(Case("tg", 1, 4, 1), Prompt((1, 2, 3, 4)))
    decodes = [call[1] for call in llama.worker.ask("fake_log") if call[0] == "decode"]
    assert decodes == [[1, 2, 3, 4], [4]] * 2


def test_a_python_without_llama_cpp(model):
    with pytest.raises(UsageError, match=r"has no llama-cpp-python. Install it there"):
        start_llama_cpp(sys.executable, model, repack=True, **ASKED)


def test_a_file_it_cannot_load(tmp_path, model):
    model.write_bytes(b"not a model")
    with pytest.raises(EngineError, match=r"llama.cpp cannot load"):
        start_llama_cpp(write_fake_python(tmp_path), model, repack=True, **ASKED)


def test_a_build_that_dies_of_an_illegal_instruction_says_what_to_try(tmp_path, model):
    dying = tmp_path / "python"
    dying.write_text(f"#!{sys.executable}\nimport os, signal\nos.kill(os.getpid(), signal.SIGILL)\n")
    dying.chmod(dying.stat().st_mode | stat.S_IXUSR)
    with pytest.raises(EngineError, match=r"SIGILL when started. .*--no-repack"):
        start_llama_cpp(str(dying), model, repack=True, **ASKED)


def test_the_worker_imports_nothing_of_ours():
    text = SCRIPT.read_text(encoding="utf-8")
    assert "luce_core" not in text
    assert os.access(SCRIPT, os.R_OK)
