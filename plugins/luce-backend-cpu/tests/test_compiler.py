"""Finding a compiler, compiling, keeping the result; and what is said when it does not work."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
from luce_backend_cpu import compiler, native

from luce_core.errors import PluginError

QUICK = ("-march=x86-64", "-O0") if os.uname().machine == "x86_64" else ("-O0",)


def fake(folder, body):
    """A compiler that answers --version, then runs `body`; it counts its other calls in `calls`."""
    path = folder / "fakecc"
    path.write_text(
        '#!/bin/sh\nif [ "$1" = "--version" ]; then echo "fake cc 1.0"; exit 0; fi\n'
        f'echo x >> "{folder}/calls"\n{body}\n'
    )
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return {"CC": str(path), "PATH": os.environ["PATH"]}


def calls(folder):
    path = folder / "calls"
    return len(path.read_text().split()) if path.exists() else 0


def test_cc_that_is_not_there(tmp_path):
    built = compiler.build({"CC": "no-such-compiler -x"}, tmp_path, QUICK)
    assert built.path is None
    assert "CC" in built.reason
    assert "'no-such-compiler' is not there" in built.reason


def test_no_compiler_at_all(tmp_path, monkeypatch):
    monkeypatch.setattr(compiler, "CANDIDATES", ("nocc", "nogcc"))
    built = compiler.build({}, tmp_path, QUICK)
    assert built.reason == "no C compiler: 'nocc' is not there; 'nogcc' is not there"


def test_a_compiler_that_fails_is_quoted(tmp_path):
    env = fake(tmp_path, 'echo "x.c:1: note: hm" >&2; echo "x.c:2: error: no such vector" >&2; exit 1')
    built = compiler.build(env, tmp_path / "cache", QUICK)
    assert built.path is None
    assert "fake cc 1.0 did not compile the C library: x.c:2: error: no such vector" in built.reason
    assert not list((tmp_path / "cache").rglob("*.so"))


def test_a_compiler_that_writes_nothing(tmp_path):
    built = compiler.build(fake(tmp_path, "exit 0"), tmp_path / "cache", QUICK)
    assert "wrote nothing" in built.reason


def test_a_compiler_that_hangs_is_stopped(tmp_path, monkeypatch):
    monkeypatch.setattr(compiler, "COMPILE_TIMEOUT_S", 0.2)
    built = compiler.build(fake(tmp_path, "exec sleep 60"), tmp_path / "cache", QUICK)
    assert "timed out" in built.reason


def test_a_cache_that_cannot_be_written(tmp_path):
    blocked = tmp_path / "file"
    blocked.write_text("")
    built = compiler.build(fake(tmp_path, "exit 0"), blocked / "cache", QUICK)
    assert built.path is None
    assert str(blocked) in built.reason


def test_the_result_is_kept_until_something_changes(tmp_path):
    env = fake(tmp_path, 'while [ "$1" != "-o" ]; do shift; done; echo lib > "$2"')
    cache = tmp_path / "cache"
    first = compiler.build(env, cache, QUICK)
    assert first.path is not None
    assert compiler.build(env, cache, QUICK) == first
    assert calls(tmp_path) == 1
    assert compiler.build(env, cache, (*QUICK, "-g")).path != first.path
    assert calls(tmp_path) == 2


def test_starts_at_the_same_time_all_get_the_whole_library(tmp_path):
    body = 'while [ "$1" != "-o" ]; do shift; done; printf half > "$2"; sleep 0.1; printf " whole" >> "$2"'
    env, cache = fake(tmp_path, body), tmp_path / "cache"

    def start(_):
        built = compiler.build(env, cache, QUICK)
        assert built.path is not None, built.reason
        return built.path.read_text()

    with ThreadPoolExecutor(6) as pool:
        assert set(pool.map(start, range(6))) == {"half whole"}
    assert len(list(cache.rglob("*.so"))) == 1


def test_a_damaged_library_is_named(tmp_path):
    path = tmp_path / "luce_cpu.so"
    path.write_bytes(b"not a library")
    with pytest.raises(PluginError, match="cannot be opened"):
        native.open_library(path)


def test_a_library_with_other_structures_is_refused(tmp_path):
    source = tmp_path / "other.c"
    source.write_text("int luce_sizes(int which) { return 1 + which; }")
    path = tmp_path / "other.so"
    subprocess.run(["cc", "-shared", "-fPIC", str(source), "-o", str(path)], check=True)
    with pytest.raises(PluginError, match=r"structures of \[1, 2, 3, 4\] bytes"):
        native.open_library(path)


def test_the_sources_compile_without_a_warning(tmp_path, sources):
    done = subprocess.run(
        ["cc", *compiler.FLAGS, *compiler.native_flags(), "-O0", "-Wall", "-Wextra", "-Werror",
        str(sources / compiler.UNIT),
         "-o", str(tmp_path / "luce_cpu.so"), "-lm"],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr


def test_the_cache_lies_where_the_user_keeps_caches(tmp_path):
    assert compiler.cache_folder({"XDG_CACHE_HOME": str(tmp_path)}) == tmp_path / "luce-core" / "cpu"


def test_compiling_imports_no_torch():
    code = "import sys; from luce_backend_cpu import compiler, hooks, machine; print('torch' in sys.modules)"
    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == "False"
