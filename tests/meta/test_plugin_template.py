"""The template of `make new-plugin` cannot rot: what it renders loads, and its tests pass."""

import importlib
import importlib.util
import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from luce_core.plugins import from_modules

ROOT = Path(__file__).parents[2]


def load_tool():
    spec = importlib.util.spec_from_file_location("new_plugin", ROOT / "tools" / "new_plugin.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


TOOL = load_tool()
KINDS = sorted(TOOL.SUMMARIES)


@pytest.mark.parametrize("kind", KINDS)
def test_entry_points_and_index_agree_with_the_hooks(tmp_path, monkeypatch, kind):
    folder = TOOL.render(f"rendered-{kind}", kind, tmp_path)
    project = tomllib.loads((folder / "pyproject.toml").read_text())["project"]
    (plugin,) = project["entry-points"]["luce_core.plugins"].items()
    monkeypatch.syspath_prepend(str(folder))
    registry = from_modules([importlib.import_module(plugin[1])])
    assert registry.record(plugin[0]).status == "loaded"
    own = {key for key, given in registry.declared.items() if given[0].plugin == plugin[0]}
    assert own == set(project["entry-points"]["luce_core.provides"])
    assert project["readme"] == "README.md"
    assert project["name"] in (folder / "README.md").read_text()
    assert "luce-core>=0.1" in project["dependencies"]


@pytest.mark.parametrize("kind", KINDS)
def test_no_placeholder_is_left(tmp_path, kind):
    folder = TOOL.render("glimmer", kind, tmp_path)
    for path in folder.rglob("*"):
        assert "@" not in path.name
        if path.is_file():
            for word in TOOL.names("glimmer", kind):
                assert f"@{word}@" not in path.read_text()


@pytest.mark.slow
def test_the_tests_of_rendered_plugins_pass(tmp_path):
    folders = [TOOL.render(f"brand-new-{kind}", kind, tmp_path) for kind in KINDS]
    paths = os.pathsep.join(map(str, [ROOT, *folders]))
    environment = os.environ | {"PYTHONPATH": paths, "OMP_NUM_THREADS": "2", "PYTHONDONTWRITEBYTECODE": "1"}
    settings = ["-q", "-p", "no:cacheprovider", "-c", str(folders[0] / "pyproject.toml")]
    command = [sys.executable, "-m", "pytest", *settings, *map(str, folders)]
    done = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False, timeout=300
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert " passed" in done.stdout
    assert "skipped" not in done.stdout


@pytest.mark.parametrize(
    ("given", "kind", "distribution", "name"),
    [
        ("glimmer", "arch", "luce-arch-glimmer", "glimmer"),
        ("luce-arch-glimmer", "arch", "luce-arch-glimmer", "glimmer"),
        ("luce-shy-first", "scheduler", "luce-shy-first", "shy-first"),
    ],
)
def test_names_follow_the_scheme(given, kind, distribution, name):
    words = TOOL.names(given, kind)
    assert (words["DISTRIBUTION"], words["NAME"]) == (distribution, name)
    assert words["MODULE"] == distribution.replace("-", "_")


@pytest.mark.parametrize("name", ["Glimmer", "two words", "", "-x", "x--y", "1st", "core", "../x"])
def test_a_bad_name_is_refused_with_what_is_wanted(tmp_path, capsys, name):
    assert TOOL.main([f"--into={tmp_path}", "--", name]) == 2
    assert "wanted lower-case letters" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_nothing_is_overwritten(tmp_path, capsys):
    assert TOOL.main(["glimmer", "--into", str(tmp_path)]) == 0
    assert "pip install -e" in capsys.readouterr().out
    assert TOOL.main(["glimmer", "--into", str(tmp_path)]) == 2
    assert "exists already" in capsys.readouterr().err
