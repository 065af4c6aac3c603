"""What doctor says under the Windows Subsystem for Linux, by made-up files."""

from pathlib import Path

import pytest

from luce_core.cli import doctor, wsl

WSL1 = "Linux version 4.4.0-19041-Microsoft (Microsoft@Microsoft.com) (gcc version 5.4.0) #1 SMP"
WSL2 = "Linux version 5.15.153.1-microsoft-standard-WSL2 (root@941d701f84f1) (gcc 11.2.0) #1 SMP"
LINUX = "Linux version 6.8.0-45-generic (buildd@lcy02-amd64-115) (x86_64-linux-gnu-gcc-13) #45-Ubuntu SMP"
HOME = Path("/home/me/models")


@pytest.fixture
def machine(tmp_path):
    """-> arguments of `hints` for a machine of that kernel, with or without the drivers."""

    def make(kernel, *, lent=True, linux=False, models=HOME):
        version, libraries, own = tmp_path / "version", tmp_path / "lib", tmp_path / "nvidia-modprobe"
        version.write_text(kernel)
        libraries.mkdir(exist_ok=True)
        if lent:
            (libraries / "libcuda.so.1").touch()
        if linux:
            own.touch()
        return models, version, libraries, own

    return make


@pytest.mark.parametrize(("kernel", "number"), [(WSL1, 1), (WSL2, 2), (LINUX, 0)])
def test_generations(tmp_path, kernel, number):
    (tmp_path / "version").write_text(kernel)
    assert wsl.generation(tmp_path / "version") == number


def test_a_system_without_that_file_is_another(tmp_path):
    assert wsl.generation(tmp_path / "nothing") == 0


def test_an_ordinary_linux_gets_no_hint(machine):
    assert list(wsl.hints(*machine(LINUX, linux=True))) == []


def test_the_first_generation_has_no_gpus(machine):
    ((level, text, fix),) = wsl.hints(*machine(WSL1))
    assert level == "note"
    assert "no GPUs" in text
    assert "--set-version" in fix


def test_the_driver_comes_from_windows(machine):
    found, memory = wsl.hints(*machine(WSL2))
    assert found[0] == "ok"
    assert "driver of Windows" in found[1]
    assert ".wslconfig" in memory[2]
    assert "pins less" in memory[1]


def test_without_it_nothing_is_to_be_installed_in_linux(machine):
    found, _ = wsl.hints(*machine(WSL2, lent=False))
    assert found[0] == "note"
    assert "in Windows, none here" in found[2]


def test_a_driver_for_linux_is_in_the_way(machine):
    levels = [level for level, _, _ in wsl.hints(*machine(WSL2, linux=True))]
    assert levels == ["wrong", "ok", "note"]


@pytest.mark.parametrize(("models", "noted"), [("/mnt/c/Users/me/models", True), ("/home/me/mnt", False)])
def test_models_on_a_drive_of_windows_are_slow(machine, models, noted):
    texts = [text for _, text, _ in wsl.hints(*machine(WSL2, models=Path(models)))]
    assert any("drive of Windows" in text for text in texts) is noted


def test_doctor_shows_them(luce, toy, monkeypatch):
    hint = ("note", "under Windows", "Look there.")
    monkeypatch.setattr(doctor.wsl, "hints", lambda models: [hint])
    shown = luce("doctor", env={"LUCE_PORT": "0"}).out
    assert "under Windows" in shown
    assert "wsl: Look there." in shown
