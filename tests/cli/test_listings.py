"""`plugins`, `devices`, `pull`, `inspect`, `config show`, `plan`."""

import hashlib
import json

import pytest

from luce_core.gguf import read_header
from luce_core.testing.gguf_header import write_header

CATALOG = """
@hookimpl
def luce_register_catalog():
    return [CatalogEntry("small", ("file:{path}",), "{sha}", {size}, "CC0-1.0", "a small one")]
"""


@pytest.fixture
def small(installed, tmp_path):
    """A catalogue with one model of our own, a local file."""
    data = b"pretend weights" * 1000
    (tmp_path / "source").write_bytes(data)
    sha = hashlib.sha256(data).hexdigest()
    installed.write("shelf", CATALOG.format(path=tmp_path / "source", sha=sha, size=len(data)))
    return data


def test_plugins_lists_what_each_provides_and_why_one_is_not_loaded(luce, toy):
    toy.add("absent", "no_such_module_at_all")
    toy.add("older", "luce_core.testing.toy.hooks", requires="luce-core>=99")
    shown = luce("plugins").out
    assert "arch.toy, ops.toy, devices" in shown
    assert "luce-toy" in shown
    assert "No module named 'no_such_module_at_all'" in shown
    assert "luce-core>=99" in shown
    rows = {row["name"]: row for row in json.loads(luce("plugins", "--json").out)}
    assert rows["toy"]["status"] == "loaded"
    assert rows["toy"]["provides"] == ["arch.toy", "ops.toy", "devices"]
    assert rows["absent"]["status"] == "broken"
    assert rows["older"]["status"] == "incompatible"
    assert rows["core"]["provides"]


def test_plugins_of_an_unloaded_package_still_says_what_it_would_provide(luce, installed):
    installed.add("absent", "no_such_module_at_all", provides=("arch.glimmer",))
    rows = {row["name"]: row for row in json.loads(luce("plugins", "--json").out)}
    assert rows["absent"]["provides"] == ["arch.glimmer"]


def test_devices(luce, toy):
    shown = luce("devices").out
    for word in ("cpu", "toy device", "1.00 GiB", "1 GB/s", "made up for tests"):
        assert word in shown
    [device] = json.loads(luce("devices", "--json").out)
    assert device["memory_bytes"] == 1 << 30
    assert device["plugin"] == "toy"


def test_no_device_says_what_to_install(luce):
    assert "pip install luce-backend-cpu" in luce("devices").out
    assert json.loads(luce("devices", "--json").out) == []


def test_a_device_plugin_that_fails_is_said_on_standard_error(luce, installed):
    installed.write("rig", "@hookimpl\ndef luce_register_devices():\n    raise RuntimeError('no bus')\n")
    shown = luce("devices", "--json")
    assert json.loads(shown.out) == []
    assert "no bus" in shown.err


def test_pull_without_a_name_lists_the_catalogue(luce, small, tmp_path):
    shown = luce("pull").out
    for word in ("small", "CC0-1.0", "a small one", "smollm2-135m", "Apache-2.0", "no"):
        assert word in shown
    assert str(tmp_path / "models") in shown


def test_pull_fetches_says_where_and_can_verify_and_remove(luce, small, tmp_path):
    first = luce("pull", "small")
    assert first.status == 0
    [path] = (tmp_path / "models").glob("small-*.gguf")
    assert str(path) in first.out
    assert path.read_bytes() == small
    assert "verifying" in first.err  # no bar where nobody watches, one line per stage
    assert "\r" not in first.err
    assert "yes" in luce("pull").out
    assert luce("pull", "small", "--verify").status == 0
    path.write_bytes(b"rotten")
    wrong = luce("pull", "small", "--verify")
    assert wrong.status == 1
    assert "'small' has changed on the disk" in wrong.err
    assert luce("pull", "small", "--remove").status == 0
    assert not path.exists()


def test_pull_of_an_unknown_name(luce):
    wrong = luce("pull", "smollm2-135")
    assert wrong.status == 2
    assert "Did you mean 'smollm2-135m'?" in wrong.err


def test_two_plugins_that_claim_a_model_name_cost_that_name_only(luce, installed, small):
    installed.write("other", CATALOG.format(path="/elsewhere", sha="0" * 64, size=1))
    assert luce("pull").status == 0
    wrong = luce("plan", "small")
    assert wrong.status == 1
    assert "'shelf'" in wrong.err
    assert "'other'" in wrong.err


def test_inspect(luce, toy, toy_model):
    shown = luce("inspect", toy_model).out
    header = read_header(toy_model)
    assert "Architecture 'toy' is served by plugin 'toy' (luce-toy 1.0)." in shown
    for word in ("GGUF 3", "toy.context_length", "toy.weight", "8 × 8", "F32"):
        assert word in shown
    data = json.loads(luce("inspect", toy_model, "--json").out)
    assert data["architecture"] == "toy"
    assert data["served"] is True
    assert data["weights"] == sum(info.num_weights for info in header.tensors.values())
    assert {row["name"] for row in data["tensors"]} == set(header.tensors)
    assert data["model"]["parameters"] == data["weights"]
    assert data["model"]["state"]["token_bytes"] > 0
    assert "State of a sequence, cache in f16: " in shown
    assert "of weights." in shown


def test_inspect_says_why_a_file_cannot_be_served(luce, installed, tmp_path):
    """The file is shown all the same."""
    installed.add("dense", "luce_core.testing.dense.hooks")
    path = write_header(tmp_path / "d.gguf", {"general.architecture": "dense"}, {"a.weight": (4, 32)})
    shown = luce("inspect", path)
    assert shown.status == 0
    assert "'dense.block_count' is missing" in shown.out
    assert "a.weight" in shown.out
    assert "is missing" in json.loads(luce("inspect", path, "--json").out)["model"]["problem"]


def test_inspect_without_the_plugin_says_what_to_install(luce, toy_model):
    shown = luce("inspect", toy_model)
    assert shown.status == 0
    assert "pip install luce-arch-toy" in shown.out
    assert json.loads(luce("inspect", toy_model, "--json").out)["served"] is False


def test_inspect_shows_the_chat_template_harmlessly(luce, toy, tmp_path):
    from luce_core.testing.toy import write_toy_model

    model = write_toy_model(tmp_path / "t.gguf", template="{{ 'x' }}\x1b[31m" + "y" * 1000)
    shown = luce("inspect", model).out
    assert "Chat template (1014 characters" in shown
    assert "\\x1b[31m" in shown
    assert "\x1b" not in shown
    assert luce("inspect", model, "--template").out.startswith("{{ 'x' }}")


def test_config_show_names_value_and_origin_and_masks_keys(luce, tmp_path):
    (tmp_path / "luce.toml").write_text("port = 9001\napi-key = ['from-the-file']\n")
    rows = json.loads(luce("config", "show", "-c", "100", "--json", env={"LUCE_THREADS": "3"}).out)
    by_name = {row["name"]: row for row in rows}
    assert (by_name["port"]["value"], by_name["port"]["source"]) == ("9001", "file")
    assert (by_name["ctx_size"]["value"], by_name["ctx_size"]["source"]) == ("100 tokens", "cli")
    assert (by_name["threads"]["value"], by_name["threads"]["by"]) == ("3", "LUCE_THREADS")
    assert by_name["host"]["source"] == "default"
    shown = luce("config", "show")
    assert "from-the-file" not in shown.out + json.dumps(rows)
    assert "****" in shown.out
    assert str(tmp_path / "luce.toml") in shown.out


def test_config_show_changed_leaves_defaults_out(luce):
    shown = luce("config", "show", "m.gguf", "--changed").out
    assert "m.gguf" in shown
    assert "temperature" not in shown


def test_naming_two_models_is_a_usage_error(luce):
    wrong = luce("config", "show", "a.gguf", "--model", "b.gguf")
    assert wrong.status == 2
    assert "'a.gguf' and --model 'b.gguf'" in wrong.err


def test_an_unread_variable_of_ours_is_an_error(luce):
    wrong = luce("config", "show", env={"LUCE_PROT": "1"})
    assert wrong.status == 2
    assert "LUCE_PROT is set and nothing reads it. Did you mean 'LUCE_PORT'?" in wrong.err


def test_plan_names_parts_plugins_classes_memory_and_origins(luce, toy, toy_model):
    shown = luce("plan", toy_model, "-c", "256")
    assert shown.status == 0, shown.err
    for word in ("luce-toy 1.0", "same bits", "weights of target", "total", "tokens/s", "--ctx-size"):
        assert word in shown.out
    data = json.loads(luce("plan", toy_model, "-c", "256", "--json").out)
    assert data["fields"]["context"]["value"] == 256
    assert data["fields"]["context"]["source"] == "cli"
    assert data["models"][0]["architecture"] == "toy"
    assert data["models"][0]["plugin"] == "toy"
    assert all(row["bytes"] >= row["floor_bytes"] >= 0 for row in data["memory"])


def test_plan_as_if_there_were_more_or_less_memory(luce, toy, toy_model):
    data = json.loads(luce("plan", toy_model, "--memory", "1G", "--json").out)
    assert data["fields"]["memory.limit_bytes"]["value"] == int(0.85 * 2**30)
    short = luce("plan", toy_model, "--memory", "1M")
    assert short.status == 1
    assert "Device 'cpu' may lend 870.4 KiB" in short.err
    wrong = luce("plan", toy_model, "--memory", "much")
    assert (wrong.status, "--memory is 'much'" in wrong.err) == (2, True)


def test_plan_fits_shows_devices_of_several_sizes(luce, toy, toy_model):
    shown = luce("plan", toy_model, "--fits")
    assert shown.status == 0, shown.err
    for word in ("had cpu so much memory", "8.00 GiB", "24.0 GiB", "128.0 GiB", "all it was trained for"):
        assert word in shown.out
    rooms = json.loads(luce("plan", toy_model, "--fits", "--json").out)
    assert [room["memory_bytes"] >> 30 for room in rooms] == [8, 12, 16, 24, 32, 48, 80, 128]
    [room] = json.loads(luce("plan", toy_model, "--fits", "--memory", "1M", "--json").out)
    assert room["context"] == 0
    assert "does not fit, short of" in luce("plan", toy_model, "--fits", "--memory", "1M").out


def test_plan_without_the_plugin_says_what_to_install(luce, toy_model):
    wrong = luce("plan", toy_model)
    assert wrong.status == 1
    assert "pip install luce-arch-toy" in wrong.err
    assert "Traceback" not in wrong.err
