import json
import socket

import pytest

from luce_core.cli.doctor import examine
from luce_core.cli.session import Session


def findings(luce, **options):
    shown = luce("doctor", "--json", **options)
    return shown.status, json.loads(shown.out)


def of(rows, subject):
    return [row for row in rows if row["subject"] == subject]


def test_a_rig_that_can_serve_has_nothing_wrong(luce, toy):
    status, rows = findings(luce, env={"LUCE_PORT": "0"})
    assert [row for row in rows if row["level"] == "wrong"] == []
    assert status == 0
    assert {"python", "torch", "options", "port", "plugins", "devices", "memory", "models"} <= {
        row["subject"] for row in rows
    }
    assert "Nothing is wrong." in luce("doctor", env={"LUCE_PORT": "0"}).out


def test_no_architecture_and_no_device_are_wrong_and_say_what_to_install(luce):
    status, rows = findings(luce, env={"LUCE_PORT": "0"})
    assert status == 1
    assert [row["level"] for row in of(rows, "devices")] == ["wrong"]
    assert "pip install luce-backend-cpu" in of(rows, "devices")[0]["fix"]
    assert any("luce-arch-" in row["fix"] for row in of(rows, "plugins"))
    assert "2 things are wrong." in luce("doctor", env={"LUCE_PORT": "0"}).out


def test_a_broken_plugin_is_wrong_and_named(luce, toy):
    toy.add("absent", "no_such_module_at_all")
    status, rows = findings(luce, env={"LUCE_PORT": "0"})
    [row] = [row for row in of(rows, "plugins") if row["level"] == "wrong"]
    assert status == 1
    assert "'absent'" in row["text"]
    assert row["fix"] == "Repair or remove it: pip uninstall luce-absent"


def test_a_taken_port_is_wrong(luce, toy):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        status, rows = findings(luce, env={"LUCE_PORT": str(taken.getsockname()[1])})
    assert status == 1
    assert of(rows, "port")[0]["level"] == "wrong"


def test_broken_options_are_a_finding_and_the_rest_is_still_examined(luce, toy):
    status, rows = findings(luce, env={"LUCE_PORT": "eighty"})
    assert status == 1
    assert "LUCE_PORT" in of(rows, "options")[0]["text"]
    assert of(rows, "memory")


def test_one_thread_and_an_unfinished_pull_are_noted(luce, toy, tmp_path):
    work = tmp_path / "models" / ".pull" / "some-model-0011aabb"
    work.mkdir(parents=True)
    (work / "model.part").write_bytes(b"")
    _, rows = findings(luce, env={"LUCE_PORT": "0", "OMP_NUM_THREADS": "1"})
    assert any(row["fix"] == "luce-core pull some-model" for row in of(rows, "models"))
    assert of(rows, "threads")


def test_torch_that_cannot_be_imported_is_wrong(luce, toy, monkeypatch):
    import sys

    monkeypatch.setitem(sys.modules, "torch", None)
    _, rows = findings(luce, env={"LUCE_PORT": "0"})
    assert of(rows, "torch")[0]["level"] == "wrong"


@pytest.mark.parametrize("missing", ["cc", "pip"])
def test_missing_tools_are_noted_with_their_fix(luce, toy, monkeypatch, missing):
    if missing == "cc":
        monkeypatch.setattr("luce_core.cli.doctor.shutil.which", lambda _: None)
    else:
        monkeypatch.setattr("luce_core.cli.doctor.importlib.util.find_spec", lambda _: None)
    _, rows = findings(luce, env={"LUCE_PORT": "0"})
    [row] = of(rows, "compiler" if missing == "cc" else "pip")
    assert row["level"] == "note"
    assert row["fix"]


def test_the_cache_folder_of_the_config_file_is_the_one_examined(toy, environment, tmp_path):
    (tmp_path / "luce.toml").write_text(f"cache = '{tmp_path / 'elsewhere'}'\nport = 0\n")
    env = {name: value for name, value in environment().items() if not name.startswith("LUCE_")}
    found = [finding.text for finding in examine(Session((), env, tmp_path)) if finding.subject == "models"]
    assert len(found) == 1
    assert found[0].endswith(str(tmp_path / "elsewhere"))


SELF_CHECK = """
import sys
@hookimpl
def luce_register_ops():
    run = f"{__name__}:run"
    ops = (OpImpl("add", "operator:add"),)
    return [
        OpLayer("checked", ops, Equivalence.BITS, self_checks=(run,)),
        OpLayer("elsewhere", ops, Equivalence.BITS, frozenset({"no such feature"}), self_checks=(run,)),
        OpLayer("silent", ops, Equivalence.BITS),
    ]
def run(device):
    assert device == "cpu"
    yield KernelCheck("good", 1e-6, 1e-4)
    yield KernelCheck("bad", 0.5, 1e-4, ("add", "mul"))
    yield KernelCheck("none", float("nan"), 1e-4, ("rms",), "--plain-rms")
    yield KernelCheck("whole", 2e-4, 1e-4)
"""


def test_kernels_that_differ_from_the_reference_are_wrong(luce, toy):
    toy.write("checked", SELF_CHECK)
    shown = luce("doctor", "--json", "--kernels", env={"LUCE_PORT": "0"})
    rows = of(json.loads(shown.out), "cpu checked")
    assert [row["level"] for row in rows] == ["ok", "wrong", "wrong", "wrong"]
    assert "bad: relative error 5.0e-01, allowed 1e-04" in rows[1]["text"]
    assert "bad" in rows[1]["fix"]
    assert "Run without it: --ops-off add --ops-off mul." in rows[1]["fix"]
    assert "Run without it: --plain-rms." in rows[2]["fix"]
    assert "Run without it: --op-layer none." in rows[3]["fix"]
    assert shown.status == 1
    assert "elsewhere" not in shown.out
    assert not of(json.loads(luce("doctor", "--json", env={"LUCE_PORT": "0"}).out), "cpu checked")


def test_a_wrong_kernel_that_is_switched_off_already_is_a_note(luce, toy):
    toy.write("checked", SELF_CHECK)
    env = {"LUCE_PORT": "0", "LUCE_OPS_OFF": "add,mul"}
    rows = of(json.loads(luce("doctor", "--json", "--kernels", env=env).out), "cpu checked")
    assert [row["level"] for row in rows] == ["ok", "note", "wrong", "wrong"]
    assert "switched off" in rows[1]["text"]
    env["LUCE_OPS_OFF"] = "add"
    rows = of(json.loads(luce("doctor", "--json", "--kernels", env=env).out), "cpu checked")
    assert rows[1]["level"] == "wrong"


def test_a_layer_that_cannot_be_made_ready_is_a_finding(luce, toy):
    refuse = "def refuse(device, options):\n    raise UsageError(f'{device.id} is too old')\n"
    source = SELF_CHECK.replace("self_checks=(run,)", 'self_checks=(run,), prepare=f"{__name__}:refuse"')
    toy.write("checked", source + "from luce_core.errors import UsageError\n" + refuse)
    rows = json.loads(luce("doctor", "--json", "--kernels", env={"LUCE_PORT": "0"}).out)
    assert of(rows, "kernels")[0]["text"] == "cpu is too old"
    assert not of(rows, "cpu checked")


def test_without_layers_that_check_themselves_doctor_says_so(luce, toy):
    shown = luce("doctor", "--json", "--kernels", env={"LUCE_PORT": "0"})
    assert [row["level"] for row in of(json.loads(shown.out), "kernels")] == ["note"]


def test_a_self_check_that_breaks_is_a_finding(luce, toy):
    toy.write("checked", SELF_CHECK.replace('assert device == "cpu"', 'raise ValueError("no such kernel")'))
    shown = luce("doctor", "--json", "--kernels", env={"LUCE_PORT": "0"})
    (row,) = of(json.loads(shown.out), "kernels")
    assert row["level"] == "wrong"
    assert "no such kernel" in row["text"]


DYING = """
import os
@hookimpl
def luce_register_ops():
    ops, run = (OpImpl("add", "operator:add"),), f"{__name__}:run"
    return [OpLayer("dying", ops, Equivalence.BITS, self_checks=(run,))]
def run(device):
    yield KernelCheck("last", 0.0, 0.0)
    os.kill(os.getpid(), 9)
"""


def test_a_self_check_that_takes_its_process_with_it_leaves_the_others_alone(luce, toy):
    toy.write("dying", DYING)
    toy.write("checked", SELF_CHECK)
    rows = json.loads(luce("doctor", "--json", "--kernels", env={"LUCE_PORT": "0"}).out)
    assert len(of(rows, "cpu checked")) == 4
    assert [row["text"][:4] for row in of(rows, "cpu dying")] == ["last"]
    (row,) = of(rows, "kernels")
    assert "The self-check" in row["text"]
    assert "of op layer 'dying'" in row["text"]
    assert "broke off: its process was killed (SIGKILL; the system may be short of memory)." in row["text"]
