import subprocess
import sys

import pytest

from luce_core.cli import main

PROBE = """
import sys
from pathlib import Path
from luce_core.cli.main import run
import os
status = run(sys.argv[1:], os.environ, Path.cwd())
heavy = {"torch", "triton", "transformers", "uvicorn"} & set(sys.modules)
print("STATUS", status, "IMPORTED", *sorted(heavy))
"""


def test_help_lists_every_command_with_its_summary(luce):
    shown = luce("--help")
    assert shown.status == 0
    for name, builtin in main.COMMANDS.items():
        assert name in shown.out
        assert builtin.summary.split(",")[0] in " ".join(shown.out.split())


@pytest.mark.parametrize("name", list(main.COMMANDS))
def test_every_command_has_help_that_says_something(luce, name):
    shown = luce(name, "--help")
    assert shown.status == 0
    assert f"Usage: luce-core {name}" in shown.out
    assert len(shown.out.splitlines()) > 4


def test_version(luce):
    import luce_core

    assert luce("--version").out.split()[-1] == luce_core.__version__


@pytest.mark.parametrize(
    "argv",
    [["--help"], ["plugins"], ["devices"], ["pull"], ["config", "show"], ["serve", "--help"],
     ["plan", "MODEL"], ["inspect", "MODEL"], ["completion", "fish"]],
    ids=lambda argv: argv[0],
)
def test_listings_import_no_torch(toy, environment, toy_model, tmp_path, argv):
    argv = [str(toy_model) if word == "MODEL" else word for word in argv]
    ran = subprocess.run(
        [sys.executable, "-c", PROBE, *argv],
        env=environment(), cwd=tmp_path, capture_output=True, text=True, check=True,
    )
    assert ran.stdout.splitlines()[-1] == "STATUS 0 IMPORTED", ran.stderr


def test_a_misspelt_option_is_corrected(luce):
    wrong = luce("serve", "--prot", "1")
    assert (wrong.status, wrong.out) == (2, "")
    assert wrong.err.strip() == "No option '--prot'. Did you mean '--port'?"


def test_the_flag_of_a_plugin_that_is_not_installed_says_what_to_install(luce):
    wrong = luce("serve", "--glimmer-glow", "1")
    assert wrong.status == 2
    assert "No option '--glimmer-glow'" in wrong.err
    assert "pip install" in wrong.err
    assert "luce-glimmer" in wrong.err


def test_plugin_options_appear_and_disappear_with_the_plugin(luce, installed):
    assert "--glow-strength" not in luce("serve", "--help").out
    installed.write(
        "glow",
        "from pydantic import BaseModel, Field\n"
        "class Options(BaseModel):\n    strength: int = Field(3, description='how bright')\n"
        "@hookimpl\ndef luce_plugin_info():\n    return PluginInfo('glow', API, options=Options)\n",
    )
    shown = luce("serve", "--help").out
    assert "Plugin glow" in shown
    assert "--glow-strength" in shown
    assert "how bright" in shown
    assert "glow.strength" in luce("config", "show", "--glow-strength", "5", "--changed").out


def test_a_misspelt_command_is_a_usage_error(luce):
    wrong = luce("srve")
    assert wrong.status == 2
    assert "No such command 'srve'" in wrong.err


@pytest.mark.parametrize("command", ["run", "serve", "plan"])
def test_an_error_is_one_sentence_without_a_traceback(luce, command):
    wrong = luce(command, "nowhere.gguf")
    assert (wrong.status, wrong.out) == (2, "")
    assert wrong.err.count("\n") == 1
    assert "'nowhere.gguf' does not exist" in wrong.err


def test_a_file_that_is_no_model_is_one_sentence(luce, toy, tmp_path):
    (tmp_path / "x.gguf").write_bytes(b"GGUF" + b"\xff" * 100)
    wrong = luce("serve", tmp_path / "x.gguf")
    assert wrong.status == 1
    assert wrong.err.count("\n") == 1
    assert "Traceback" not in wrong.err


@pytest.mark.parametrize("place", [0, 1, 2])
def test_debug_shows_the_traceback_wherever_it_stands(program, place):
    argv = ["plan", "nowhere.gguf"]
    argv.insert(place, "--debug")
    wrong = program(*argv)
    assert wrong.status == 1  # Python's own, for an exception nobody caught
    assert "Traceback" in wrong.err
    assert "UsageError" in wrong.err


def test_a_bug_is_a_sentence_too(luce, monkeypatch):
    def broken(**_lists):
        raise ZeroDivisionError("the cause")

    monkeypatch.setattr("luce_core.cli.session.plugins.discover", broken)
    wrong = luce("plugins")
    assert wrong.status == 70
    assert "ZeroDivisionError: the cause" in wrong.err
    assert "--debug" in wrong.err
    with pytest.raises(ZeroDivisionError):
        luce("plugins", "--debug")


def test_ctrl_c_is_status_130_and_silent(luce, monkeypatch):
    def interrupted(**_lists):
        raise KeyboardInterrupt

    monkeypatch.setattr("luce_core.cli.session.plugins.discover", interrupted)
    assert luce("plugins").status == 130
    assert luce("plugins").err.strip() == ""


def test_a_reader_that_leaves_early_is_no_error(environment, tmp_path):
    """As in `luce-core serve --help | head -1`, with more output than a pipe holds."""
    code = (
        "import os, sys\nfrom pathlib import Path\nfrom luce_core.cli import main\n"
        "main.root = lambda: lambda *a, **k: None\n"
        "class Root:\n    def main(self, *a, **k):\n        print('x' * 10**6)\n"
        "main.root = Root\nsys.exit(main.run([], os.environ, Path.cwd()))\n"
    )
    first = subprocess.Popen(
        [sys.executable, "-c", code], env=environment(), cwd=tmp_path,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )
    assert first.stdout.read(1) == b"x"
    first.stdout.close()
    assert first.stderr.read() == b""
    first.stderr.close()
    assert first.wait() == 0


def test_commands_of_plugins_are_listed_and_run(luce, installed):
    (installed.folder / "glow_commands.py").write_text(
        "import click\n\ndef make():\n"
        "    return click.Command('shine', callback=lambda: click.echo('bright'))\n\n"
        "def wrong():\n    return 7\n"
    )
    installed.write(
        "glow",
        "@hookimpl\ndef luce_register_commands():\n"
        "    return [CommandSpec('shine', 'glow_commands:make', 'Shines.'),\n"
        "            CommandSpec('broken', 'glow_commands:wrong', 'Does not.')]\n",
    )
    shown = luce("--help").out
    assert "Commands of plugins" in shown
    assert "Shines." in shown
    assert luce("shine").out == "bright\n"
    wrong = luce("broken")
    assert wrong.status == 1
    assert "'broken'" in wrong.err
    assert "wanted a click.Command" in wrong.err


def test_a_named_plugin_that_is_missing_is_an_error(luce):
    wrong = luce("plan", "--plugin", "glimmer")
    assert wrong.status == 1
    assert "'glimmer' was asked for and is not installed" in wrong.err


def test_a_blocked_plugin_loses_its_device(luce, toy):
    assert "toy device" in luce("devices").out
    blocked = luce("config", "show", "--plugin-block", "toy")
    assert blocked.status == 0
    assert "toy" in luce("plugins", env={"LUCE_PLUGIN_BLOCK": "toy"}).out
    assert "toy device" not in luce("devices", env={"LUCE_PLUGIN_BLOCK": "toy"}).out
