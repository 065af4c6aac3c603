from pathlib import Path

import pytest

from luce_core.errors import UsageError
from luce_core.option_fields import READERS
from luce_core.paths import expand_home


def test_a_home_is_expanded_and_other_paths_stay(monkeypatch):
    monkeypatch.setenv("HOME", "/somewhere")
    assert expand_home("~/m.gguf") == Path("/somewhere/m.gguf")
    assert expand_home("a/~b") == Path("a/~b")


@pytest.mark.parametrize("path", ["~nobody-here", "~nobody-here/m.gguf", "~0"])
def test_a_home_nobody_has_is_a_usage_error(path):
    with pytest.raises(UsageError, match="home folder nobody has"):
        expand_home(path)


def test_no_code_expands_a_home_by_itself():
    package = Path(__file__).parents[1] / "luce_core"
    users = [path for path in package.rglob("*.py") if ".expanduser()" in path.read_text(encoding="utf-8")]
    assert [path.name for path in users] == ["paths.py"]


def test_path_options_are_read_with_it():
    assert READERS[Path]("~/x") == expand_home("~/x")
