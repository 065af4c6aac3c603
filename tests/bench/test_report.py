import json

import pytest
from attrs import evolve

from luce_core.bench import report as words
from luce_core.bench.conditions import Conditions
from luce_core.bench.energy import Absent, Energy
from luce_core.bench.render import markdown, number, share
from luce_core.bench.report import PeerFacts, Report

from .conftest import HOST, SUBJECT, result

OURS = Conditions("m", "f16", "f16", True, 2, 4096)
RESULTS = [
    result("pp", 512, rates=(400.0, 380.0, 420.0), peer=(100.0, 90.0, 110.0)),
    result("tg", 128, rates=(90.0,), peer=(10.0,), bound_tokens_s=120.0),
]


def report(results=RESULTS, theirs=OURS, **more):
    peer = PeerFacts("llama-cpp-python 0.3", OURS, theirs)
    fields = {"host": HOST, "subject": SUBJECT, "repetitions": 3, "seed": 0, "results": results, "peer": peer}
    return Report(**{**fields, **more})


def test_rows_name_medians_ranges_and_ratios():
    made = words.table(report())
    rows = [dict(zip(made.columns, row, strict=True)) for row in made.rows]
    assert rows[0] == {
        "test": "pp512",
        "tokens/s": "400",
        "min-max": "380-420",
        "stddev": "20.0",
        "of bandwidth": "-",
        "peak host": "256.0 MiB",
        "llama.cpp": "100",
        "its min-max": "90.0-110",
        "ratio": "4.00",
    }
    assert rows[1]["of bandwidth"] == "75%"
    assert (rows[1]["stddev"], rows[1]["ratio"]) == ("-", "9.00")


def test_the_gain_is_printed_with_what_it_comes_from():
    [said] = [line for line in words.foot(report()) if "Gain" in line]
    assert said == "Gain over llama-cpp-python 0.3 (pp512, tg128): 6.00 = √(prefill 4.00 × decode 9.00)."


def test_no_gain_and_no_ratio_when_a_condition_differs():
    made = report(theirs=evolve(OURS, threads=4, flash_attention=False))
    said = "\n".join(words.foot(made))
    assert "Gain" not in said
    assert "No gain over llama-cpp-python 0.3: conditions differ" in said
    assert "threads: 2 and 4" in said
    assert "flash attention: on and off" in said
    assert "ratio" not in words.table(made).columns
    data = words.as_data(made)
    assert data["peer"]["gains"] == []
    assert len(data["peer"]["differences"]) == 2


def test_a_gain_takes_both_tests():
    said = words.foot(report(RESULTS[:1]))
    assert any("takes a pp and a tg test" in line for line in said)


def test_alone_there_is_no_word_of_a_peer():
    made = report([result("pp", 4)], peer=None)
    assert words.table(made).columns == ("test", "tokens/s", "min-max", "peak host")
    assert words.foot(made) == []
    assert "peer" not in words.as_data(made)


def test_every_result_says_all_it_was_measured_on():
    data = json.loads(json.dumps(words.as_data(report())))
    assert data["format"] == "luce-core bench model 1"
    for record in data["results"]:
        for name in (
            "test",
            "kind",
            "tokens",
            "depth",
            "batch",
            "device",
            "device_name",
            "model",
            "architecture",
            "quant",
            "parameters",
            "context",
            "k_type",
            "v_type",
            "op_layers",
            "drafters",
            "threads",
            "luce_core",
            "torch",
            "plugins",
            "commit",
            "date",
            "host_cpu",
            "peak_rss_bytes",
            "peak_device_bytes",
            "repetitions",
            "seed",
        ):
            assert name in record, name
    first = data["results"][0]
    assert first["tokens_s"] == {
        "median": 400.0,
        "low": 380.0,
        "high": 420.0,
        "stddev": 20.0,
        "samples": [400.0, 380.0, 420.0],
    }
    assert data["peer"]["gains"][0]["gain"] == 6.0


def test_energy_is_there_or_absent_and_never_zero():
    used = result("tg", 128, energy=Energy(200.0, 10.0, 7.2))
    made = report([used], peer=None)
    assert dict(zip(words.table(made).columns, words.table(made).rows[0], strict=True))["J/token"] == "1"
    assert words.as_data(made)["results"][0]["energy"]["j_per_token"] == pytest.approx(1.0)
    without = report([result("tg", 128)], peer=None, energy=Absent("no NVML here"))
    assert "J/token" not in words.table(without).columns
    assert "Energy is not measured: no NVML here." in words.foot(without)
    data = words.as_data(without)
    assert "energy" not in data["results"][0]
    assert data["energy_absent"] == "no NVML here"


def test_a_busy_machine_stands_below_the_table():
    made = report([result("pp", 4)], peer=None, host=evolve(HOST, load=5.0))
    assert words.foot(made) == [evolve(HOST, load=5.0).busy]


def test_drafts_are_shown_with_a_warning():
    made = report([result("tg", 128, drafted=50, accepted=20)], peer=None)
    assert "40%" in words.table(made).rows[0]
    assert any("random tokens" in line for line in words.foot(made))


def test_the_head_says_what_on():
    said = "\n".join(words.head(report()))
    for word in (
        "tiny",
        "llama",
        "Q4_1",
        "134.5 M",
        "2 threads",
        "cpu-c",
        "context 4096",
        "f16/f16",
        "abc123",
        "2.13.0",
        "luce-backend-cpu 0.1.0",
        "a CPU",
        "load 0.50",
        "3 repetitions",
        "seed 0",
    ):
        assert word in said


def test_panels_are_speed_over_depth_with_spread():
    results = [
        result("pp", 512, 1024, rates=(2.0, 3.0, 1.0), peer=(1.0,)),
        result("pp", 512, 0, rates=(5.0,), peer=(2.0,)),
    ]
    [panel] = words.panels(report(results))
    ours, theirs = panel.series
    assert (ours.name, theirs.name) == ("pp512", "pp512, llama.cpp")
    assert (ours.x, ours.y, ours.low, ours.high) == ((0, 1024), (5.0, 2.0), (5.0, 1.0), (5.0, 3.0))
    assert "Q4_1" in words.caption(report())


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (0.123, "0.12"),
        (9.99, "9.99"),
        (9.996, "10.0"),
        (12.34, "12.3"),
        (99.96, "100"),
        (1234.5, "1234"),
        (-50.0, "-50.0"),
        (0.0, "0.00"),
    ],
)
def test_numbers_have_three_figures(value, shown):
    assert number(value) == shown


def test_shares_and_markdown():
    assert (share(0.256), share(None)) == ("26%", "-")
    text = markdown(words.table(report(RESULTS[1:])))
    lines = text.splitlines()
    assert lines[0].startswith("| test | tokens/s |")
    assert lines[1].startswith("| --- | ---: |")
    assert len({line.count("|") for line in lines}) == 1
