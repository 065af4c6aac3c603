"""`luce-core bench`: a toy model in this process, beside a llama.cpp that only pretends, and servers."""

import importlib.util
import json
import socket
from pathlib import Path

import pytest

from luce_core.server.settings import ServerSettings
from luce_core.testing.pipeline import make_pipeline
from luce_core.testing.server import serving
from luce_core.testing.toy import write_toy_model

SMALL = ("-p", "40", "-n", "8", "-r", "2")
FAST = """
@hookimpl
def luce_register_ops():
    impl = OpImpl("attention", "luce_core.ops.attention:attention")
    return [OpLayer("fast", (impl,), Equivalence.BITS)]
"""
"""The reference's attention under another name: enough to count as a layer's own."""


def sibling(name):
    """A module of tests/bench."""
    path = Path(__file__).parents[1] / "bench" / f"{name}.py"
    spec = importlib.util.spec_from_file_location(f"bench_{name}", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def results(shown):
    assert shown.status == 0, shown.err
    return json.loads(shown.out)


# --- a model


def test_a_model_is_measured_and_every_result_carries_what_on(luce, toy, toy_model):
    data = results(luce("bench", toy_model, *SMALL, "-d", "0,64", "-b", "1,2", "--json", "-"))
    assert data["format"] == "luce-core bench model 1"
    assert [record["test"] for record in data["results"]] == [
        "pp40",
        "tg8",
        "pp40 @ d64",
        "tg8 @ d64",
        "pp40 × 2",
        "tg8 × 2",
        "pp40 @ d64 × 2",
        "tg8 @ d64 × 2",
    ]
    for record in data["results"]:
        speed = record["tokens_s"]
        assert len(speed["samples"]) == 2
        assert 0 < speed["low"] <= speed["median"] <= speed["high"]
        assert (record["model"], record["architecture"], record["device"]) == ("toy", "toy", "cpu")
        assert (record["op_layers"], record["drafters"], record["context"]) == (["toy"], [], 512)
        assert record["plugins"] == {"luce-toy": "1.0"}
        assert record["commit"]
        assert (record["bound_share"] is not None) == (record["kind"] == "tg")


def test_the_table_and_what_it_was_measured_on(luce, toy, toy_model):
    shown = luce("bench", toy_model, *SMALL, "--cache-type-k", "f32", "--cache-type-v", "bf16")
    assert shown.status == 0, shown.err
    for word in (
        "toy",
        "F32",
        "KV f32/bf16",
        "ops toy",
        "luce-toy 1.0",
        "pp40",
        "tg8",
        "min-max",
        "stddev",
        "peak host",
        "of bandwidth",
        "made up for tests",
        "2 repetitions",
    ):
        assert word in shown.out, word
    assert "\x1b" not in shown.out
    assert "\r" not in shown.err  # no bar where nobody watches


def test_markdown_and_a_json_file(luce, toy, toy_model, tmp_path):
    file = tmp_path / "out.json"
    shown = luce("bench", toy_model, *SMALL, "--markdown", "--json", file)
    assert shown.status == 0, shown.err
    assert "| test | tokens/s |" in shown.out
    assert "\n| pp40 |" in shown.out
    assert len(json.loads(file.read_text())["results"]) == 2


def test_more_sequences_than_serve_would_run(luce, toy, toy_model):
    data = results(luce("bench", toy_model, "-p", "0", "-n", "4", "-b", "6", "-r", "1", "--json", "-"))
    [record] = data["results"]
    assert (record["batch"], record["max_sequences"]) == (6, 6)


def test_drafters_of_the_plan_run_and_are_named(luce, toy, toy_model):
    toy.add("toy-draft", "luce_core.testing.toy.draft_hooks")
    run = ("-p", "4", "-n", "60", "-r", "1", "--drafter", "toy-head", "--json", "-")
    records = results(luce("bench", toy_model, *run))["results"]
    assert records[1]["drafters"] == ["toy-head"]
    assert records[1]["drafted_tokens"] > 0


def test_a_picture(luce, toy, toy_model, tmp_path):
    pytest.importorskip("matplotlib")
    shown = luce("bench", toy_model, *SMALL, "--plot", tmp_path / "speed.png")
    assert shown.status == 0, shown.err
    assert (tmp_path / "speed.png").read_bytes().startswith(b"\x89PNG")


def test_a_picture_without_the_extra_is_refused_before_anything_is_measured(
    toy, program, toy_model, tmp_path
):
    blocker = toy.folder / "matplotlib"
    blocker.mkdir()
    (blocker / "__init__.py").write_text("raise ImportError('not here')\n")
    wrong = program("bench", toy_model, *SMALL, "--plot", tmp_path / "speed.png")
    assert (wrong.status, wrong.out) == (2, "")
    assert "--plot needs matplotlib (not here). pip install 'luce-core[plot]'." in wrong.err


def test_energy_is_absent_with_a_reason(luce, toy, toy_model):
    shown = luce("bench", toy_model, *SMALL, "--energy")
    assert "Energy is not measured: the plan runs on cpu, and NVML counts GPUs." in shown.out
    assert "J/token" not in shown.out


# --- beside llama.cpp


@pytest.fixture
def peer(tmp_path):
    return sibling("fake_llama").write_fake_python(tmp_path)


def test_a_peer_under_the_same_conditions_gives_a_gain(luce, toy, toy_model, peer):
    toy.write("fast", FAST)
    fast = ("--op-layer", "toy", "--op-layer", "fast")
    data = results(luce("bench", toy_model, *SMALL, *fast, "--peer", peer, "--no-repack", "--json", "-"))
    assert data["peer"]["differences"] == []
    assert data["peer"]["conditions"] == data["peer"]["our_conditions"]
    assert data["peer"]["conditions"]["context"] == 512
    [gain] = data["peer"]["gains"]
    pp, tg = (record["tokens_s"]["median"] / record["peer_tokens_s"]["median"] for record in data["results"])
    assert gain["gain"] == pytest.approx((pp * tg) ** 0.5)
    shown = luce("bench", toy_model, *SMALL, *fast, "--peer", peer)
    assert "Gain over llama-cpp-python 0.0.fake (pp40, tg8)" in shown.out
    assert "ratio" in shown.out


def test_a_peer_under_other_conditions_gives_none(luce, toy, toy_model, peer):
    shown = luce("bench", toy_model, *SMALL, "--peer", peer)
    assert shown.status == 0, shown.err
    assert "No gain over llama-cpp-python 0.0.fake: conditions differ" in shown.out
    assert "flash attention: off and on" in shown.out
    [columns] = [line for line in shown.out.splitlines() if line.startswith("test ")]
    assert "llama.cpp" in columns
    assert "ratio" not in columns
    assert "flash attention: off and on" in shown.err  # said before anything is measured


# --- a server


@pytest.fixture
def served(tmp_path):
    """served(api_keys=..., **options) -> context manager of the kit's server over a toy."""

    def make(*, api_keys=(), context=512, **options):
        path = write_toy_model(tmp_path / "served.gguf", salt=7, context=context)
        return serving(make_pipeline(path, options=options), settings=ServerSettings(api_keys=api_keys))

    return make


LADDER = ("--concurrency", "1,3", "--requests", "6", "-p", "5", "-n", "9")


def test_a_ladder_against_our_own_server(luce, served):
    with served() as server:
        data = results(luce("bench", "--url", server.url, *LADDER, "--json", "-"))
    assert [record["concurrency"] for record in data["results"]] == [1, 3]
    for record in data["results"]:
        assert record["ends"] == {"ok": 6}
        assert record["tokens"] == 54  # the toy would end earlier: ignore_eos holds
        assert record["tokens_counted_from"] == "usage"
        assert record["fields_given_up"] == []
        assert record["prompt_tokens"] > 5
        assert record["total_tokens_s"] > 0
        for times in (record["ttft_s"], record["inter_token_s"]):
            assert 0 <= times["p50"] <= times["p90"] <= times["p99"]
        assert record["model"] == "toy"


def test_the_table_of_a_ladder_and_its_picture(luce, served, tmp_path):
    pytest.importorskip("matplotlib")
    with served() as server:
        shown = luce("bench", "named", "--url", f"{server.url}/v1/", *LADDER, "--plot", tmp_path / "l.png")
    assert shown.status == 0, shown.err
    for word in (
        "named at http://127.0.0.1",
        "concurrency",
        "429",
        "errors",
        "TTFT",
        "counted by the server",
    ):
        assert word in shown.out
    assert (tmp_path / "l.png").read_bytes().startswith(b"\x89PNG")


def test_prompts_of_a_file(luce, served, tmp_path):
    file = tmp_path / "p.jsonl"
    file.write_text('{"prompt": "hello"}\n{"messages": [{"role": "user", "content": "you"}]}\n')
    with served() as server:
        shown = luce(
            "bench",
            "--url",
            server.url,
            "--prompts",
            file,
            "-n",
            "3",
            "--concurrency",
            "2",
            "--requests",
            "4",
            "--json",
            "-",
        )
    [record] = results(shown)["results"]
    assert (record["prompts"], record["prompt_words"], record["ends"]) == (str(file), None, {"ok": 4})


def test_a_key_is_wanted_given_and_never_shown(luce, served, tmp_path):
    with served(api_keys=("hush",)) as server:
        wrong = luce("bench", "--url", server.url, *LADDER)
        assert (wrong.status, wrong.out) == (2, "")
        assert "wants a key" in wrong.err
        assert "--api-key" in wrong.err
        refused = luce("bench", "--url", server.url, *LADDER, "--api-key", "other")
        assert "refuses the key" in refused.err
        shown = luce("bench", "--url", server.url, *LADDER, "--api-key", "hush")
        assert shown.status == 0, shown.err
        assert "hush" not in shown.out + shown.err
        assert luce("bench", "--url", server.url, *LADDER, env={"LUCE_API_KEY": "hush"}).status == 0
        (tmp_path / "luce.toml").write_text('api-key = ["hush"]\n')
        assert (
            luce("bench", "--url", server.url, *LADDER).status == 2
        )  # the key of one's own server stays here


def test_a_server_that_dies_gives_one_error_and_what_came_before(luce, tmp_path):
    raw = sibling("conftest")
    server = raw.Raw(raw.GOOD)

    def last(client, body):
        server.die()
        client.sendall(raw.STREAM + raw.chunk("a"))

    server.answers = [raw.GOOD] * 8 + [last]
    try:
        file = tmp_path / "out.json"
        shown = luce(
            "bench", "--url", server.url, "--concurrency", "1,2,4", "--requests", "5", "--json", file
        )
    finally:
        server.close()
    assert shown.status == 1
    assert "is gone (connection refused), at concurrency 2" in shown.err
    assert len(shown.err.splitlines()) == 1
    assert "counted from chunks" in shown.out
    records = json.loads(file.read_text())["results"]
    assert [record["concurrency"] for record in records] == [1, 2]
    assert records[0]["ends"] == {"ok": 5}


def test_rejects_are_shown(luce):
    raw = sibling("conftest")
    server = raw.Raw(raw.GOOD, raw.GOOD, raw.says(raw.whole(429, {"error": {"message": "full"}})))
    try:
        shown = luce("bench", "--url", server.url, "--concurrency", "1", "--requests", "4", "--json", "-")
    finally:
        server.close()
    [record] = results(shown)["results"]
    assert record["ends"] == {"ok": 1, "rejected": 3}


# --- what is wrong is one sentence


@pytest.mark.parametrize(
    ("argv", "status", "said"),
    [
        (("no-such-model.gguf",), 2, "no-such-model.gguf"),
        (("MODEL", "-r", "0"), 2, "0"),
        (("MODEL", "-p", "1,x"), 2, "'1,x', wanted whole numbers of at least 0, like 1,2,4"),
        (("MODEL", "-b", "0"), 2, "whole numbers of at least 1"),
        (("MODEL", "-p", "0", "-n", "0"), 2, "-p and -n are both 0"),
        (
            ("MODEL", "-p", "500", "-d", "100"),
            2,
            "'pp500 @ d100' comes to 601 tokens a sequence; the context is 512",
        ),
        (
            ("MODEL", "-p", "9", "-b", "9", "--max-sequences", "4"),
            2,
            "runs 9 sequences; --max-sequences is 4",
        ),
        (("MODEL", "-b", "2", "--peer", "x"), 2, "--peer compares one sequence at a time"),
        (("MODEL", *SMALL, "--peer", "/no/such/python"), 2, "'/no/such/python'"),
        (("MODEL", "--concurrency", "2"), 2, "--concurrency goes with --url"),
        (("MODEL", "--json", "no/such/folder/x.json"), 2, "the folder 'no/such/folder' is not there"),
        (("MODEL", "--json", "-", "--markdown"), 2, "both print"),
        (("--url", "http://h/api"), 2, "ends in '/v1'"),
        (("--url", "http://h", "-d", "5"), 2, "-d does not go with --url"),
        (("--url", "http://h", "--peer"), 2, "--peer does not go with --url"),
        (("--url", "http://h", "-n", "1,2"), 2, "-n takes one length"),
        (("--url", "http://h", "-p", "0"), 2, "-p takes lengths of at least 1"),
        (("--url", "http://h", "-p", "4", "--prompts", "x"), 2, "both say what to send"),
        (("--url", "http://h", "--prompts", "no.jsonl"), 2, "--prompts 'no.jsonl' cannot be read"),
    ],
)
def test_bad_input_is_one_clear_error(luce, toy, toy_model, argv, status, said):
    wrong = luce("bench", *(str(toy_model) if word == "MODEL" else word for word in argv))
    assert (wrong.status, wrong.out) == (status, "")
    assert said in wrong.err
    assert len(wrong.err.strip().splitlines()) == 1


def test_nobody_at_the_address(luce):
    with socket.create_server(("127.0.0.1", 0)) as gone:
        port = gone.getsockname()[1]
    wrong = luce("bench", "--url", f"http://127.0.0.1:{port}")
    assert (wrong.status, wrong.out) == (2, "")
    assert f"Nobody answers at http://127.0.0.1:{port}/v1: connection refused." in wrong.err
