"""The tutorial of docs/plugins, done as it says: its files are written, installed and tested."""

import json
import os
import re
import subprocess
import sys
import tempfile
import tomllib
from importlib import import_module
from pathlib import Path

import pytest
from importlib_metadata import Distribution

import luce_core
from luce_core.plugins import discover
from luce_core.testing import fake_plugins
from luce_core.testing.contract import Contract, kit_tests

ROOT = Path(__file__).parents[2]
TUTORIAL = ROOT / "docs" / "plugins"
HOME = Path(luce_core.__file__).parents[1]
"""Where this process found luce_core; programs are to find the same."""
GLIMMER = ROOT / "examples" / "third-party-arch"


def page(name: str) -> str:
    return (TUTORIAL / name).read_text(encoding="utf-8")


def blocks(name: str, *languages: str) -> list[str]:
    found = re.findall(r"^```(\w*)\n(.*?)^```$", page(name), re.M | re.S)
    return [body for language, body in found if language in languages]


def versions(path: str) -> list[str]:
    """Every version of one file of the tutorial, in the order of its steps."""
    return [body for body in blocks("README.md", "python", "toml") if body.startswith(f"# {path}\n")]


def files() -> set[str]:
    bodies = blocks("README.md", "python", "toml")
    return {found[1] for body in bodies if (found := re.match(r"# (luce-[\w./-]+)\n", body))}


def write(folder: Path, step: int) -> None:
    """The tutorial's files as they are after a step (0 is the first), or at the end (-1)."""
    for path in files():
        target = folder / path
        target.parent.mkdir(parents=True, exist_ok=True)
        shown = versions(path)
        target.write_text(shown[min(step, len(shown) - 1)], encoding="utf-8")


def metadata(project: Path, site: Path) -> None:
    """Install the metadata a build backend would make of a project; its modules stay where they are."""
    table = tomllib.loads(project.read_text(encoding="utf-8"))["project"]
    info = site / f"{table['name'].replace('-', '_')}-{table['version']}.dist-info"
    info.mkdir(parents=True)
    needs = "".join(f"Requires-Dist: {item}\n" for item in table["dependencies"])
    header = f"Metadata-Version: 2.1\nName: {table['name']}\nVersion: {table['version']}\n{needs}"
    (info / "METADATA").write_text(header, encoding="utf-8")
    lines = []
    for group, entries in table["entry-points"].items():
        lines += [f"[{group}]", *(f"{name} = {value}" for name, value in entries.items())]
    (info / "entry_points.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")


def run(folder: Path, *command: str, path: list[Path], **more: str) -> str:
    """Standard output of a program that finds these folders and the core."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("LUCE_", "DFLASH_"))}
    paths = os.pathsep.join(map(str, [*path, HOME]))
    ours = {"PYTHONPATH": paths, "OMP_NUM_THREADS": "2", "XDG_CONFIG_HOME": str(folder)}
    line, env = [sys.executable, *command], {**kept, **ours, **more}
    done = subprocess.run(
        line, cwd=folder, env=env, capture_output=True, text=True, timeout=600, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_first_step_is_two_files():
    first = page("README.md").partition("## 2.")[0]
    shown = re.findall(r"^```(?:toml|python)\n# (\S+)$", first, re.M)
    assert shown == ["luce-one-by-one/pyproject.toml", "luce-one-by-one/luce_one_by_one.py"]


def test_the_two_files_are_visible_in_luce_core_plugins(tmp_path):
    write(tmp_path, 0)
    project = tmp_path / "luce-one-by-one"
    metadata(project / "pyproject.toml", tmp_path / "site")
    listed = run(
        tmp_path, "-m", "luce_core", "plugins",
        path=[tmp_path / "site", project], LUCE_PLUGIN_ALLOW="one-by-one",
    )  # fmt: skip
    rows = [line.split() for line in listed.splitlines()]
    mine = ["one-by-one", "luce-one-by-one", "0.1.0", "loaded"]
    assert mine in rows
    assert mine in [line.split() for line in blocks("README.md", "text")[0].splitlines()]


@pytest.mark.slow
def test_pip_installs_the_two_files_as_the_page_says(tmp_path):
    pytest.importorskip("hatchling", reason="the build backend of the page's pyproject.toml is not installed")
    write(tmp_path, 0)
    site = tmp_path / "site"
    pip = ["-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps"]
    run(tmp_path, *pip, "--no-build-isolation", "--target", str(site), "./luce-one-by-one", path=[])
    assert (site / "luce_one_by_one.py").exists()
    listing = ["-m", "luce_core", "plugins", "--json"]
    listed = run(tmp_path, *listing, path=[site], LUCE_PLUGIN_ALLOW="one-by-one")
    (mine,) = [row for row in json.loads(listed) if row["name"] == "one-by-one"]
    assert (mine["distribution"], mine["version"], mine["status"]) == ("luce-one-by-one", "0.1.0", "loaded")


def test_the_second_step_adds_an_option_in_three_spellings(tmp_path):
    write(tmp_path, 1)
    project = tmp_path / "luce-one-by-one"
    metadata(project / "pyproject.toml", tmp_path / "site")
    path = [tmp_path / "site", project]
    allowed = {"LUCE_PLUGIN_ALLOW": "one-by-one"}
    told = run(tmp_path, "-m", "luce_core", "serve", "--help", path=path, **allowed)
    assert "--one-by-one-first oldest|shortest" in told
    show = ["-m", "luce_core", "config", "show", "--json"]
    (tmp_path / "luce.toml").write_text('[one-by-one]\nfirst = "shortest"\n', encoding="utf-8")
    for arguments, variables, source in [
        ([], {}, "file"),
        ([], {"LUCE_ONE_BY_ONE_FIRST": "shortest"}, "env"),
        (["--one-by-one-first", "shortest"], {}, "cli"),
    ]:
        rows = json.loads(run(tmp_path, *show, *arguments, path=path, **allowed, **variables))
        (mine,) = [row for row in rows if row["name"] == "one-by-one.first"]
        assert (mine["value"], mine["source"]) == ("shortest", source)


@pytest.mark.slow
def test_the_tests_of_the_finished_tutorial_pass(tmp_path):
    write(tmp_path, -1)
    (tmp_path / "luce-half" / "luce_half" / "__init__.py").touch()
    projects = [tmp_path / "luce-one-by-one", tmp_path / "luce-half"]
    for project in projects:
        metadata(project / "pyproject.toml", tmp_path / "site")
    path = [tmp_path / "site", *projects, GLIMMER]
    run(tmp_path, str(GLIMMER / "make_model.py"), "luce-half/small.gguf", path=path)
    ini = tmp_path / "pytest.ini"
    ini.write_text("[pytest]\naddopts = --import-mode=importlib\nfilterwarnings = error\n", encoding="utf-8")
    settings = ["-q", "-p", "no:cacheprovider", "-c", str(ini), *map(str, projects)]
    told = run(tmp_path, "-m", "pytest", *settings, path=path)
    passed = re.search(r"\b(\d+) passed", told)
    assert passed, told
    assert int(passed[1]) >= 21, told  # two contracts of the kit and the tutorial's own; the kit may grow
    assert "skipped" not in told


@pytest.mark.parametrize(
    ("name", "made"), [("state.md", "rig"), ("testing.md", "rig"), ("chat.md", "arguments")]
)
def test_the_code_of_a_page_runs_from_top_to_bottom(name, made, tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    namespace = {"__name__": "page"}
    for block in blocks(name, "python"):
        exec(compile(block, name, "exec"), namespace)
    assert made in namespace


# --- what the pages say about the kit and about broken plugins


def contracts() -> dict[str, type[Contract]]:
    folder = Path(fake_plugins.__file__).parent
    names = [path.stem for path in folder.glob("*.py") if path.stem != "__init__"]
    modules = [import_module(f"luce_core.testing.{name}") for name in names]
    found = [item for module in modules for item in vars(module).values() if isinstance(item, type)]
    return {item.__name__: item for item in found if issubclass(item, Contract) and item is not Contract}


def test_every_test_of_every_contract_is_on_its_page():
    text = page("testing.md")
    found = re.findall(r"^## (.*?)\n(.*?)(?=^## |\Z)", text, re.M | re.S)
    sections = {head.partition(":")[0]: body for head, body in found}
    assert len(contracts()) >= 5
    for name, contract in contracts().items():
        assert name in sections, f"{name} has no section in testing.md"
        listed = set(re.findall(r"^\| `(test_\w+)` \|", sections[name], re.M))
        assert listed == kit_tests(contract), f"testing.md and {name} differ"


def reasons(tmp_path, monkeypatch) -> set[tuple[str, str]]:
    """(status, reason) of plugins broken in every way the page shows."""
    monkeypatch.syspath_prepend(str(tmp_path))
    head = "from luce_core.contracts import *\nfrom luce_core.hookspecs import hookimpl\n"

    def add(name, body="", *, api="API", requires="luce-core>=0.1", distribution="", options=""):
        module = f"luce_{distribution or name}_of_the_page".replace("-", "_")
        arguments = f"{name!r}, {api}, {'Options' if options else None}"
        info = f"@hookimpl\ndef luce_plugin_info():\n    return PluginInfo({arguments})\n"
        fake_plugins.install(
            tmp_path,
            distribution or f"luce-{name}",
            version="0.2.0",
            plugins={name: module},
            requires=[requires],
            modules={module: head + options + info + body},
        )

    hook = "@hookimpl\ndef {}:\n    return []\n"
    add("glow", requires="luce-core>=0.5")
    add("api", api="2")
    add("missing", "import no_such_module\n")
    add("misspelt", hook.format("luce_register_arch()"))
    add("argument", hook.format("luce_extend_plan(plan, device)"))
    add("unmarked", "def luce_register_archs():\n    return []\n")
    add("draft", options="from pydantic import BaseModel\nclass Options(BaseModel):\n    nodes: int = 1\n")
    add("twin", distribution="luce-one")
    add("twin", distribution="luce-other")
    add("unwanted")
    here = Distribution.discover(path=[str(tmp_path)])
    registry = discover(distributions=here, block=["unwanted"], core_version="0.1.0")
    return {(record.status, record.reason) for record in registry.records}


def test_what_users_see_of_a_broken_plugin_is_what_the_page_shows(tmp_path, monkeypatch):
    section = page("README.md").partition("**What users see.**")[2].partition("**Conflicts.**")[0]
    shown = set(re.findall(r"^\| (incompatible|broken|duplicate|blocked) \| (.+?) \|$", section, re.M))
    assert len(shown) >= 8
    real = reasons(tmp_path, monkeypatch)
    assert shown <= real, f"not what the core says: {sorted(shown - real)}; it says {sorted(real)}"
