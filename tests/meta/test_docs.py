"""What the pages say exists: links, commands, flags, make words, imported names."""

import ast
import importlib
import re
import shlex
import sys
import tomllib
from importlib import import_module
from pathlib import Path
from typing import NamedTuple

import click
import pytest

from luce_core import plugins
from luce_core.cli.main import COMMANDS
from luce_core.cli.session import Session

ROOT = Path(__file__).parents[2]
TEMPLATE = ROOT / "tools" / "plugin-template"
GENERATED = {"docs/hooks.md", "docs/metrics.md", "docs/options.md"}
"""Written by `luce_core.docs`: signatures without bodies, rows as long as the help."""


def markdown_pages() -> list[str]:
    found = [path.relative_to(ROOT) for path in ROOT.rglob("*.md") if TEMPLATE not in path.parents]
    skipped = {"build", "dist", "node_modules"}
    kept = [p for p in found if not any(part.startswith(".") or part in skipped for part in p.parts)]
    return sorted(path.as_posix() for path in kept)


PAGES = markdown_pages()
HISTORY = ("LOG.md", "CHANGELOG.md")
"""May speak of what was there once."""
WRITTEN = [page for page in PAGES if page not in GENERATED and not page.endswith(HISTORY)]


def text_of(page: str) -> str:
    return (ROOT / page).read_text(encoding="utf-8")


def fences(page: str, *languages: str) -> list[str]:
    """Fenced blocks in one of these languages."""
    found = re.findall(r"^```(\w*)\n(.*?)^```$", text_of(page), re.M | re.S)
    return [body for language, body in found if language in languages]


def prose(page: str) -> str:
    """The page without its fenced and its indented blocks."""
    return re.sub(r"^```.*?^```$|^ {4}.*$", "", text_of(page), flags=re.M | re.S)


def spans(page: str) -> list[str]:
    """Code within sentences and tables, line breaks undone."""
    return [" ".join(found.split()).replace("\\|", "|") for found in re.findall(r"`([^`]+)`", prose(page))]


def command_lines(page: str) -> list[list[str]]:
    """Everything a reader could type: lines of shell blocks, indented lines, code in sentences."""
    indented = re.findall(r"^ {4}(\S.*)$", text_of(page), re.M)
    lines = [line for block in fences(page, "sh", "bash", "") for line in block.splitlines()] + indented
    words = []
    for line in [*lines, *spans(page)]:
        try:
            words.append(shlex.split(line, comments=True))
        except ValueError:
            continue  # an apostrophe: not a command line
    return [w for w in map(without_variables, words) if w]


def without_variables(words: list[str]) -> list[str]:
    while words and re.match(r"[A-Z_]+=", words[0]):
        words = words[1:]
    return words


def test_there_are_pages():
    assert {"README.md", "CONTRIBUTING.md", "docs/plugins/README.md", "docs/architecture.md"} <= set(PAGES)


# --- links


def anchors(page: str) -> set[str]:
    """Ids a renderer gives to the headings of a page."""
    headings = re.findall(r"^#+ (.*)$", prose(page), re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES)
def test_every_relative_link_leads_somewhere(page):
    for target in re.findall(r"\]\(([^)\s]+)\)", prose(page)):
        if re.match(r"[a-z]+:", target):
            continue
        path, _, anchor = target.partition("#")
        found = (ROOT / page).parent / path if path else ROOT / page
        assert found.exists(), f"{page} links to {target!r}, which is not there"
        if anchor:
            assert anchor in anchors(found.resolve().relative_to(ROOT).as_posix()), f"{page}: {target!r}"


# --- commands


class Everything(NamedTuple):
    session: Session
    commands: dict[str, click.Command]


@pytest.fixture(scope="module")
def everything(tmp_path_factory):
    """The commands with every plugin of this repository and the tutorial's, installed or not."""
    with pytest.MonkeyPatch.context() as patch:
        sources = {}
        for kind in ("plugins", "examples"):
            for project in sorted(ROOT.glob(f"{kind}/*/pyproject.toml")):
                sources |= entry_points(project)
        tutorial = tmp_path_factory.mktemp("tutorial")
        (tutorial / "luce_one_by_one.py").write_text(tutorial_module(), encoding="utf-8")
        sources["luce_one_by_one"] = tutorial
        for folder in sources.values():
            patch.syspath_prepend(str(folder))
        registry = plugins.from_modules([importlib.import_module(name) for name in sources])
        patch.setattr(plugins, "discover", lambda **_: registry)
        session = Session((), {}, tutorial)
        modules = {name: import_module(f"luce_core.cli.{item.module}") for name, item in COMMANDS.items()}
        known = {name: module.make(session) for name, module in modules.items()}
        yield Everything(session, known)
        sys.modules.pop("luce_one_by_one", None)


def entry_points(project: Path) -> dict[str, Path]:
    """Module of hooks -> the folder it is imported from."""
    tables = tomllib.loads(project.read_text(encoding="utf-8"))["project"]["entry-points"]
    return dict.fromkeys(tables["luce_core.plugins"].values(), project.parent)


def tutorial_module() -> str:
    blocks = fences("docs/plugins/README.md", "python")
    return [block for block in blocks if block.startswith("# luce-one-by-one/luce_one_by_one.py")][-1]


def flags_of(command: click.Command) -> set[str]:
    own = {flag for item in command.params for flag in (*item.opts, *item.secondary_opts)}
    if isinstance(command, click.Group):
        own |= {flag for child in command.commands.values() for flag in flags_of(child)}
    return own | {"--help", "--debug"}


def check_line(words: list[str], known: dict[str, click.Command]) -> str:
    """What is wrong with a `luce-core ...` line, or nothing."""
    rest = words[1:]
    if not rest or not re.fullmatch(r"[a-z][a-z-]*", rest[0]) or rest[0].startswith("luce-"):
        return ""  # flags of the program itself, placeholders, a list of packages
    command = known.get(rest.pop(0))
    if command is None:
        return f"{words}: no such command"
    while isinstance(command, click.Group) and rest and not rest[0].startswith("-"):
        command = command.commands.get(rest.pop(0))
        if command is None:
            return f"{words}: no such command"
    flags = {word.partition("=")[0] for word in rest if re.match(r"-{1,2}[a-z]", word)}
    unknown = flags - flags_of(command)
    return f"{words}: no such flag: {sorted(unknown)}" if unknown else ""


@pytest.mark.parametrize("page", WRITTEN)
def test_every_command_line_of_luce_core_is_one(page, everything):
    lines = [words for words in command_lines(page) if words[0] == "luce-core"]
    wrong = [found for words in lines if (found := check_line(words, everything.commands))]
    assert not wrong, f"{page}: {wrong}"


@pytest.mark.parametrize("page", WRITTEN)
def test_every_flag_in_a_sentence_exists(page, everything):
    known = set().union(*(flags_of(command) for command in everything.commands.values()))
    named = {
        flag
        for span in spans(page)
        if span.startswith("--")
        for flag in re.findall(r"(?<!\S)--[a-z][a-z0-9-]*(?![\w-])", span)
    }
    hint = "Write the program's name before a flag that is not luce-core's."
    assert named <= known, f"{page} names flags nobody reads: {sorted(named - known)}. {hint}"


@pytest.mark.parametrize("page", WRITTEN)
def test_every_variable_is_read_by_something(page, everything):
    read = {item.env for item in everything.session.fields}
    named = set(re.findall(r"\bLUCE_[A-Z0-9]+(?:_[A-Z0-9]+)*\b", text_of(page))) - {"LUCE_NAME_FIELD"}
    elsewhere = {name for name in named - read if not in_sources(name)}
    assert not elsewhere, f"{page} names variables nobody reads: {sorted(elsewhere)}"


def in_sources(name: str) -> bool:
    """Whether a module outside the options reads this variable by its full name."""
    files = [*ROOT.glob("luce_core/**/*.py"), *ROOT.glob("plugins/*/luce_*/**/*.py")]
    return any(f'"{name}"' in path.read_text(encoding="utf-8") for path in files)


@pytest.mark.parametrize(
    ("line", "wrong"),
    [
        ("luce-core serv m.gguf", "no such command"),
        ("luce-core config shaw", "no such command"),
        ("luce-core serve m.gguf --prot 1", "--prot"),
        ("luce-core serve m.gguf --port=1 --one-by-one-first oldest", ""),
        ("luce-core config show --changed", ""),
    ],
)
def test_the_check_of_command_lines_would_notice(line, wrong, everything):
    found = check_line(line.split(), everything.commands)
    assert (wrong in found) if wrong else not found


@pytest.mark.parametrize("page", WRITTEN)
def test_every_make_word_is_a_target(page):
    targets = set(re.findall(r"^([a-z][a-z-]*):", text_of("Makefile"), re.M))
    words = {words[1] for words in command_lines(page) if words[0] == "make" and len(words) > 1}
    named = {word for word in words if re.fullmatch(r"[a-z-]+", word)}
    assert named <= targets, f"{page}: no target of the Makefile: {sorted(named - targets)}"


# --- code


def python_blocks() -> list[tuple[str, str]]:
    return [(page, block) for page in WRITTEN for block in fences(page, "python", "py")]


@pytest.mark.parametrize(("page", "block"), python_blocks())
def test_every_python_block_compiles_and_imports_what_exists(page, block):
    tree = ast.parse(block, filename=page)
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("luce_core"):
            module = import_module(node.module)
            for name in node.names:
                assert hasattr(module, name.name), f"{page}: {node.module} has no {name.name!r}"


@pytest.mark.parametrize("page", WRITTEN)
def test_every_toml_block_parses(page):
    for block in fences(page, "toml"):
        tomllib.loads(block)


@pytest.mark.parametrize("page", WRITTEN)
def test_every_path_in_a_sentence_exists(page):
    """`luce_core/contracts/model.py`, `docs/hooks.md`: files of this repository."""
    rooted = r"(?:luce_core|docs|plugins|examples|tools|tests|benchmarks)/[\w./-]*[\w/]"
    for span in spans(page):
        if re.fullmatch(rooted, span):
            places = [ROOT / span, (ROOT / page).parent / span]
            assert any(place.exists() for place in places), f"{page} names {span!r}, which is not there"


# --- form


def test_the_readme_is_short():
    assert len(text_of("README.md").splitlines()) <= 150


SHORT = ["README.md", "CONTRIBUTING.md", *(page for page in WRITTEN if page.startswith("docs/"))]
HOME_FOLDERS = r"(?<![\w./~$}])/(?:home|root|work|Users|mnt|tmp|data|workspace)/[\w./-]*"


@pytest.mark.parametrize("page", SHORT)
def test_lines_are_short(page):
    long = [number for number, line in enumerate(text_of(page).splitlines(), 1) if len(line) > 150]
    assert not long, f"{page}, lines {long}: more than 150 characters"


@pytest.mark.parametrize("page", PAGES)
def test_no_page_speaks_of_one_machine(page):
    found = re.findall(HOME_FOLDERS, text_of(page))
    assert not found, f"{page}: paths of one machine: {found}"


@pytest.mark.parametrize("folder", ["plugins", "examples"])
def test_every_package_has_a_readme(folder):
    projects = sorted(ROOT.glob(f"{folder}/*/pyproject.toml"))
    assert projects
    for project in projects:
        name = tomllib.loads(project.read_text(encoding="utf-8"))["project"]["name"]
        readme = (project.parent / "README.md").read_text(encoding="utf-8")
        assert name in readme, f"{project.parent.name}/README.md does not name {name!r}"
        assert len(readme.splitlines()) >= 15, f"{project.parent.name}/README.md is a stub"
