"""The loader: precedence, origins, strictness, plugin namespaces, everything wrong at once."""

from pathlib import Path
from typing import Annotated

import click
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel, Field

from luce_core.contracts import CatalogEntry, Profile
from luce_core.core_options import CoreOptions
from luce_core.errors import UsageError
from luce_core.option_fields import OptionInfo
from luce_core.options import (
    choose_plugins,
    click_option,
    click_values,
    config_files,
    explain_flag,
    load_options,
    option_fields,
)
from luce_core.plugins import from_modules
from luce_core.testing.fake_plugins import make_plugin


class GlimOptions(BaseModel):
    exact: bool = Field(False, description="No shortcuts.")
    tier: str = "auto"
    width: int = Field(4, ge=1, le=8)
    token: Annotated[str, OptionInfo(secret=True)] = ""


MODEL = CatalogEntry(
    "tiny", ("file:/x",), "0" * 64, 1, "MIT", "tiny", {"ctx-size": 111, "temperature": 0.5, "glim.width": 5}
)
PROFILES = [
    Profile("laptop", {"ctx_size": 222, "glim.width": 6}, "small"),
    Profile("typo", {"ctx_sise": 1}, "wrong"),
    Profile("foreign", {"dflash.width": 3, "port": 9999}, "for plugins that may be missing"),
]


@pytest.fixture
def registry():
    return from_modules([make_plugin("glim", options=GlimOptions, luce_register_catalog=[MODEL, *PROFILES])])


@pytest.fixture
def bare():
    return from_modules([])


@pytest.fixture
def toml(tmp_path):
    def write(text, name="luce.toml"):
        path = tmp_path / name
        path.write_text(text, encoding="utf-8")
        return path

    return write


def problems(*arguments, **more):
    with pytest.raises(UsageError) as caught:
        load_options(*arguments, **more)
    return str(caught.value).splitlines()


# --- precedence


LADDER = ["cli", "env", "file", "profile", "card", "default"]


@pytest.mark.parametrize("top", range(len(LADDER)))
@pytest.mark.parametrize(("name", "flag"), [("ctx_size", "ctx-size"), ("glim.width", "width")])
def test_the_stronger_source_wins(registry, toml, top, name, flag):
    said = LADDER[top:]
    values = {"ctx_size": [444, 333, 300, 222, 111, 0], "glim.width": [8, 7, 2, 6, 5, 4]}[name]
    table = "" if name == "ctx_size" else "[glim]\n"
    env_name = "LUCE_CTX_SIZE" if name == "ctx_size" else "LUCE_GLIM_WIDTH"
    options = load_options(
        registry,
        {
            name: values[0] if "cli" in said else None,
            "model": "tiny" if "card" in said else None,
            "profile": "laptop" if "profile" in said else None,
        },
        {env_name: str(values[1])} if "env" in said else {},
        [toml(f"{table}{flag} = {values[2]}")] if "file" in said else [],
    )
    got = options.core.ctx_size if name == "ctx_size" else options.plugin("glim").width
    assert got == values[top]
    assert options.origin[name].source == LADDER[top]
    assert options.set_by_user(name) == (LADDER[top] in ("cli", "env", "file"))


def test_the_origin_says_where_in_words(registry, toml):
    path = toml("[glim]\nwidth = 2\n")
    options = load_options(
        registry, {"port": 1, "profile": "laptop", "model": "tiny"}, {"LUCE_HOST": "::1"}, [path]
    )
    by = {name: origin.by for name, origin in options.origin.items()}
    assert by["port"] == "--port"
    assert by["host"] == "LUCE_HOST"
    assert by["glim.width"] == f"{path}: [glim] width"
    assert by["ctx_size"] == "profile laptop"
    assert by["temperature"] == "card of tiny"
    assert by["top_k"] == "default"
    assert set(by) == {item.name for item in option_fields(registry)}


def test_of_two_files_the_first_is_stronger(registry, toml):
    near, far = toml("port = 1\n", "near.toml"), toml("port = 2\nhost = 'a'\n", "far.toml")
    options = load_options(registry, {}, {}, [near, far])
    assert (options.core.port, options.core.host) == (1, "a")


def test_config_files_are_found_where_they_belong(tmp_path):
    home, cwd = tmp_path / "home", tmp_path / "cwd"
    own = home / ".config" / "luce-core" / "config.toml"
    for path in (own, cwd / "luce.toml"):
        path.parent.mkdir(parents=True)
        path.write_text("")
    assert config_files({"HOME": str(home)}, cwd) == [cwd / "luce.toml", own]
    assert config_files({"HOME": str(home), "XDG_CONFIG_HOME": str(tmp_path)}, cwd) == [cwd / "luce.toml"]
    assert config_files({"XDG_CONFIG_HOME": str(home / ".config")}, tmp_path) == [own]


def test_a_named_config_file_replaces_the_usual_ones(registry, toml, tmp_path):
    usual, named = toml("port = 1\nhost = 'a'\n"), toml("port = 2\n", "named.toml")
    options = load_options(registry, {"config": str(named)}, {}, [usual])
    assert (options.core.port, options.core.host) == (2, "127.0.0.1")
    (line,) = problems(registry, {"config": str(tmp_path / "absent.toml")}, {}, [])
    assert "absent.toml: cannot be read" in line


@given(st.dictionaries(st.sampled_from(LADDER[:3]), st.integers(1, 65535)))
def test_precedence_holds_for_any_subset(said):
    options = load_options(
        from_modules([]),
        {"port": said.get("cli")},
        {"LUCE_PORT": str(said["env"])} if "env" in said else {},
        [],
        card={"port": said["file"]} if "file" in said else None,
    )
    expected = next((said[source] for source in LADDER[:3] if source in said), 8080)
    assert options.core.port == expected


# --- strictness


def test_everything_wrong_is_reported_at_once(registry, toml):
    path = toml("port = 'x'\nhosst = 'a'\n[glim]\nwidht = 3\nwidth = 99\n[dflash]\nwidth = 3\n")
    lines = problems(
        registry,
        {"ctx_size": "many", "no_such": 1},
        {"LUCE_PORTT": "1", "LUCE_DFLASH_WIDTH": "3", "LUCE_INSECURE": "perhaps"},
        [path],
    )
    text = "\n".join(lines)
    assert "--ctx-size is 'many': wanted a whole number." in lines
    assert "No option '--no-such'." in text
    assert "LUCE_PORTT is set and nothing reads it. Did you mean 'LUCE_PORT'?" in lines
    assert "LUCE_DFLASH_WIDTH is set and nothing reads it. No plugin 'dflash' is installed" in text
    assert "LUCE_INSECURE is 'perhaps': wanted one of 1, true" in text
    assert f"{path}: port is 'x': wanted a whole number." in lines
    assert f"{path}: unknown option 'hosst'. Did you mean 'host'?" in lines
    assert f"{path}: unknown option 'widht' in [glim]. Did you mean 'width'?" in lines
    assert f"{path}: table [dflash] belongs to no loaded plugin." in text
    assert f"{path}: [glim] width is 99: input should be less than or equal to 8." in lines
    assert len(lines) == 10


@pytest.mark.parametrize(
    "text", ["port = true", "port = 1.5", "port = [1]", "host = 3", "insecure = 1", "port = ", "plugin = [1]"]
)
def test_a_config_value_of_the_wrong_type_is_refused(registry, toml, text):
    (line,) = problems(registry, {}, {}, [toml(text)])
    assert "luce.toml" in line


def test_values_of_a_config_file_may_be_written_as_on_the_command_line(registry, toml):
    path = toml("cache-bytes = '2GiB'\nplugin-block = ['a', 'b']\ndrafter = 'x,y'\ntemperature = 1\n")
    core = load_options(registry, {}, {}, [path]).core
    assert core.cache_bytes == 2**31
    assert core.plugin_block == ("a", "b")
    assert core.drafter == ("x", "y")
    assert core.temperature == 1.0


def test_limits_are_checked_with_the_place_that_broke_them(registry):
    assert problems(registry, {}, {"LUCE_PORT": "99999"}, []) == [
        "LUCE_PORT is 99999: input should be less than or equal to 65535."
    ]


def test_other_environment_variables_are_none_of_our_business(registry):
    environment = {"PATH": "/bin", "luce_port": "1", "XLUCE_PORT": "1"}
    assert load_options(registry, {}, environment, []).core.port == 8080


def test_old_names_of_the_environment_are_read_with_a_notice(registry):
    options = load_options(registry, {}, {"DFLASH_PORT": "81", "DFLASH_UNKNOWN": "1"}, [])
    assert options.core.port == 81
    assert options.notices == ("DFLASH_PORT is read as LUCE_PORT; use that name.",)
    options = load_options(registry, {}, {"DFLASH_PORT": "81", "LUCE_PORT": "82"}, [])
    assert (options.core.port, options.notices) == (82, ())


# --- profiles and cards


def test_an_unknown_profile_lists_what_there_is(registry):
    (line,) = problems(registry, {"profile": "laptob"}, {}, [])
    assert "profile 'laptob'" in line
    assert "Did you mean 'laptop'?" in line
    assert "Installed: foreign, laptop, typo." in line


def test_a_misspelt_profile_is_an_error_and_a_missing_plugin_a_notice(registry):
    (line,) = problems(registry, {"profile": "typo"}, {}, [])
    assert line == "profile typo: unknown option 'ctx_sise'. Did you mean 'ctx_size'?"
    options = load_options(registry, {"profile": "foreign"}, {}, [])
    assert options.core.port == 9999
    assert options.notices[0].startswith("profile foreign sets 'dflash.width', left out: No plugin 'dflash'")


def test_a_card_can_be_given(registry):
    options = load_options(registry, {"model": "tiny"}, {}, [], card={"top_k": 7})
    assert (options.core.top_k, options.core.ctx_size) == (7, 0)
    assert options.origin["top_k"].by == "card of tiny"


def test_the_card_of_the_default_model_counts_when_nobody_names_one(registry):
    options = load_options(registry, {}, {}, [], default_model="tiny")
    assert (options.core.model, options.origin["ctx_size"].by) == (None, "card of tiny")
    assert options.origin["model"].source == "default"
    named = load_options(registry, {"model": "another.gguf"}, {}, [], default_model="tiny")
    assert named.origin["ctx_size"].source == "default"


# --- plugins come and go


def test_a_removed_plugin_takes_its_flags_and_leaves_a_sentence(registry, bare, toml):
    assert "--glim-width" in {item.flag for item in option_fields(registry)}
    assert "--glim-width" not in {item.flag for item in option_fields(bare)}
    sentence = "No plugin 'glim' is installed; by the naming scheme it comes with one of: pip install luce-"
    assert sentence in explain_flag("--glim-width", bare)
    assert sentence in problems(bare, {}, {"LUCE_GLIM_WIDTH": "3"}, [])[0]
    assert sentence in problems(bare, {}, {}, [toml("[glim]\nwidth = 3\n")])[0]


def test_a_misspelt_flag_of_a_loaded_plugin_is_not_an_installation_problem(registry):
    assert explain_flag("--glim-widht", registry) == "No option '--glim-widht'. Did you mean '--glim-width'?"
    assert "plugin 'glim' is loaded and has no such option" in explain_flag("--glim-zzzzzzzz", registry)


def test_a_flag_belongs_to_one_plugin_only():
    class Clash(BaseModel):
        size: int = 1

    class Longer(BaseModel):
        b_c: int = 1

    class Shorter(BaseModel):
        c: int = 1

    from luce_core.errors import PluginError

    with pytest.raises(PluginError, match="its flag --ctx-size is also one of plugin 'core'"):
        from_modules([make_plugin("ctx", options=Clash)])
    with pytest.raises(PluginError, match="its flag --a-b-c is also one of plugin 'a-b'"):
        from_modules([make_plugin("a", options=Longer), make_plugin("a-b", options=Shorter)])


def test_every_option_of_a_plugin_needs_a_default():
    class Needy(BaseModel):
        path: str

    from luce_core.errors import PluginError

    with pytest.raises(PluginError, match="its option 'path' has no default"):
        from_modules([make_plugin("needy", options=Needy)])


# --- what is known before discovery


def test_plugin_lists_are_read_before_any_plugin_is_known(toml):
    path = toml("plugin-allow = ['c']\nunknown = 1\n[glim]\nwidth = 3\n")
    environment = {"LUCE_PLUGIN_BLOCK": "b", "LUCE_X": "1"}
    choice = choose_plugins({"plugin": ("a",), "glim.width": 3}, environment, [path])
    assert (choice.named, choice.block, choice.allow) == (("a",), ("b",), ("c",))
    with pytest.raises(UsageError, match=r"luce\.toml: plugin-allow is 3: wanted TEXT"):
        choose_plugins({}, {}, [toml("plugin-allow = 3\n")])


# --- showing


def test_secrets_are_masked_everywhere(registry):
    options = load_options(registry, {"api_key": ("hunter2", "hunter3"), "glim.token": "hunter4"}, {}, [])
    rows = {row.name: row for row in options.masked()}
    assert rows["api_key"].value == "****, ****"
    assert rows["glim.token"].value == "****"
    assert "hunter" not in str([options.masked()])
    assert (rows["api_key"].source, rows["api_key"].by) == ("cli", "--api-key")
    assert rows["cache_bytes"].value == "0 B"
    assert rows["glim.exact"].value == "off"


# --- click


def test_flags_of_click_feed_the_same_reader(registry):
    got = {}

    def run(**params):
        got.update(click_values(option_fields(registry), params))

    flags = [click_option(item) for item in option_fields(registry)]
    command = click.Command("x", params=flags, callback=run)
    arguments = ["-c", "4KK", "--no-insecure", "--glim-exact", "--plugin", "a", "--plugin", "b"]
    command.main([*arguments, "--glim-width", "3", "-m", "tiny"], standalone_mode=False)
    assert got["ctx_size"] == "4KK"
    assert got["insecure"] is False
    assert got["glim.exact"] is True
    assert got["plugin"] == ("a", "b")
    assert problems(registry, got, {}, []) == ["--ctx-size is '4KK': wanted a whole number."]
    options = load_options(registry, {**got, "ctx_size": "4096"}, {}, [])
    assert (options.core.ctx_size, options.plugin("glim").width) == (4096, 3)
    assert options.origin["port"].source == "default"
    assert options.origin["strict_model"].source == "default"


def test_help_names_every_option_with_its_default(registry):
    command = click.Command("x", params=[click_option(item) for item in option_fields(registry)])
    text = " ".join(command.get_help(click.Context(command, terminal_width=200)).split())
    assert "--glim-exact / --no-glim-exact No shortcuts. [default: off]" in text
    assert "--cache-type-k f32|f16|bf16" in text
    for item in option_fields(registry):
        assert item.flag in text


def test_every_core_option_has_help_and_a_group():
    for item in option_fields(from_modules([])):
        assert item.help.endswith("."), item.name
        assert item.info.group, item.name
    assert {item.field for item in option_fields(from_modules([]))} == set(CoreOptions.model_fields)


def test_paths_of_a_home_are_expanded(registry, monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    options = load_options(registry, {"chat_template_file": "~/x.jinja"}, {}, [])
    assert options.core.chat_template_file == Path(tmp_path) / "x.jinja"


def test_a_home_folder_nobody_has_is_refused_with_what_named_it(registry):
    with pytest.raises(UsageError) as caught:
        load_options(registry, {}, {"LUCE_CHAT_TEMPLATE_FILE": "~nobody-here/x", "LUCE_PORT": "x"}, [])
    first, second = str(caught.value).splitlines()
    assert first.startswith("LUCE_CHAT_TEMPLATE_FILE is '~nobody-here/x': wanted a path; ")
    assert second.startswith("LUCE_PORT is 'x'")
