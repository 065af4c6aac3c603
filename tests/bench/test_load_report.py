import json

import pytest
from attrs import evolve

from luce_core.bench import load_report as words
from luce_core.bench.client import parse_url
from luce_core.bench.energy import Absent, Energy
from luce_core.bench.load import Rung, Server
from luce_core.bench.load_report import LoadReport
from luce_core.bench.timeline import Answer

from .conftest import HOST

SERVER = Server(parse_url("http://h:1", key="secret"), "tiny", "uvicorn")


def answer(sent, first, gap, chunks, usage=None, prompt=None):
    times = tuple(sent + first + place * gap for place in range(chunks))
    return Answer("ok", "", sent, times[-1], times, prompt, usage)


def report(*rungs, **more):
    fields = {"host": HOST, "server": SERVER, "max_tokens": 8, "seed": 0, "rungs": rungs}
    return LoadReport(**{**fields, **more})


def rung(concurrency=1, usage=3, words=4, extra=(), **more):
    answers = (answer(0.0, 0.1, 0.02, 3, usage, 9 if usage else None), *extra)
    return Rung(concurrency, words, answers, 2.0, **more)


def cells(made):
    return [dict(zip(made.columns, row, strict=True)) for row in made.rows]


def test_a_row():
    [row] = cells(
        words.table(report(rung(extra=(Answer("rejected"), Answer("cut", "x"), Answer("status", "y")))))
    )
    assert row == {
        "concurrency": "1",
        "words": "4",
        "prompt tokens": "9",
        "ok": "1",
        "429": "1",
        "errors": "2",
        "TTFT p50/p90/p99 ms": "100 / 100 / 100",
        "inter-token p50/p90/p99 ms": "20.0 / 20.0 / 20.0",
        "tokens/s each": "50.0",
        "tokens/s total": "1.50",
    }


def test_rejects_are_never_hidden():
    [row] = cells(words.table(report(Rung(1, 4, (Answer("rejected"),) * 3, 1.0))))
    assert (row["ok"], row["429"], row["errors"]) == ("0", "3", "0")


@pytest.mark.parametrize(
    ("usages", "counted", "said"),
    [
        ((3, 3), "usage", "counted by the server"),
        ((None, None), "chunks", "counted from chunks"),
        ((3, None), "usage, and chunks where an answer has none", "counted from usage, and chunks"),
    ],
)
def test_where_counts_come_from_is_said(usages, counted, said):
    made = report(*(rung(usage=usage) for usage in usages))
    assert made.counted == counted
    assert any(said in line for line in words.foot(made))
    assert words.as_data(made)["results"][0]["tokens_counted_from"] == counted


def test_chunks_of_several_tokens_are_said():
    made = report(rung(usage=6))
    assert made.tokens_per_chunk == 2.0
    assert any("A chunk holds 2.00 tokens" in line for line in words.foot(made))
    assert not any("A chunk holds" in line for line in words.foot(report(rung(usage=3))))
    assert report(rung(usage=None)).tokens_per_chunk is None


def test_reasons_and_refused_fields_are_said():
    server = Server(SERVER.target, "tiny", "", ("ignore_eos",))
    made = report(rung(8, extra=(Answer("cut", "x"), Answer("cut", "x"))), server=server)
    said = "\n".join(words.foot(made))
    assert "The server refuses ignore_eos, so requests go without; answers may end early." in said
    assert "At concurrency 8: 2 × cut: x" in said


def test_every_rung_says_all_it_was_measured_on_but_no_key():
    made = report(rung(1), rung(2), prompts="p.jsonl")
    text = json.dumps(words.as_data(made))
    assert "secret" not in text
    for record in json.loads(text)["results"]:
        for name in (
            "url",
            "model",
            "server",
            "commit",
            "date",
            "host_cpu",
            "max_tokens",
            "prompts",
            "ttft_s",
            "inter_token_s",
            "ends",
            "reasons",
            "tokens_counted_from",
            "fields_given_up",
        ):
            assert name in record, name
    assert "secret" not in "\n".join(words.head(made)) + words.caption(made)


def test_a_busy_machine_stands_below_the_table():
    assert evolve(HOST, load=5.0).busy in words.foot(report(rung(), host=evolve(HOST, load=5.0)))


def test_energy():
    made = report(rung(energy=Energy(9.0, 2.0, 3.0)))
    assert cells(words.table(made))[0]["J/token"] == "1"
    absent = report(rung(), energy=Absent("why"))
    assert "Energy is not measured: why." in words.foot(absent)
    assert "energy" not in words.as_data(absent)["results"][0]


def test_panels():
    made = words.panels(report(rung(1), rung(4), rung(1, words=9), Rung(4, 9, (), 0.0)))
    assert [panel.title for panel in made] == ["Throughput", "Time to first token", "Between tokens"]
    total, longer = made[0].series
    assert (total.name, total.x, total.y) == ("total, 4 words", (1.0, 4.0), (1.5, 1.5))
    assert longer.x == (1.0, 4.0)
    assert {series.name for series in made[1].series} == {
        "p50, 4 words",
        "p50, 9 words",
        "p99, 4 words",
        "p99, 9 words",
    }
    assert made[1].series[0].y == pytest.approx((100.0, 100.0))
    assert words.panels(report(Rung(1, 4, (), 0.0)))[0].title == "Throughput"
