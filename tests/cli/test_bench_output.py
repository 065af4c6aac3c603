"""What `bench` shows when it ends early."""

from types import SimpleNamespace

import pytest

from luce_core.bench.render import Table
from luce_core.cli.bench_output import Outputs
from luce_core.errors import EngineError

WORDS = SimpleNamespace(
    head=lambda report: ["what on"],
    table=lambda report: Table(("test", "speed"), (("pp [red]1[/red]", "7"),)),
    foot=lambda report: ["what to know"],
    as_data=lambda report: {"results": [report]},
)
PLAIN = Outputs(None, False, None, None)


@pytest.mark.parametrize("error", [EngineError("dead"), KeyboardInterrupt()])
def test_what_came_before_is_shown_and_the_error_goes_on(capsys, error):
    with pytest.raises(type(error)), PLAIN.shown(WORDS, "report", [1]):
        raise error
    shown = capsys.readouterr().out
    assert "pp [red]1[/red]" in shown
    assert shown.count("what on") == 1


@pytest.mark.parametrize("error", [EngineError("dead"), KeyboardInterrupt()])
def test_without_results_nothing_is_shown(capsys, error):
    with pytest.raises(type(error)), PLAIN.shown(WORDS, "report", []):
        raise error
    assert capsys.readouterr().out == ""


def test_a_bug_is_no_result(capsys):
    with pytest.raises(ZeroDivisionError), PLAIN.shown(WORDS, "report", [1]):
        raise ZeroDivisionError
    assert capsys.readouterr().out == ""


def test_a_file_that_cannot_be_written_after_all(tmp_path, capsys):
    from luce_core.errors import UsageError

    outputs = Outputs(str(tmp_path), False, None, None)  # a folder
    with pytest.raises(UsageError, match="cannot be written"), outputs.shown(WORDS, "report", [1]):
        pass
    assert "what to know" in capsys.readouterr().out
