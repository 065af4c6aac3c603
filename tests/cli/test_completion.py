import shutil
import subprocess

import pytest


@pytest.mark.parametrize("shell", ["zsh", "fish"])
def test_scripts_name_the_program_and_the_variable(luce, shell):
    script = luce("completion", shell).out
    assert "luce-core" in script
    assert "_LUCE_CORE_COMPLETE" in script


def test_an_unknown_shell_is_a_usage_error(luce):
    wrong = luce("completion", "tcsh")
    assert wrong.status == 2
    assert "'bash', 'zsh', 'fish'" in wrong.err


@pytest.mark.skipif(shutil.which("bash") is None, reason="bash is not installed")
def test_the_bash_script_is_valid_and_defines_a_completion(luce):
    script = luce("completion", "bash").out
    subprocess.run(["bash", "-n"], input=script, text=True, check=True)
    defined = subprocess.run(
        ["bash", "-c", f"{script}\ncomplete -p luce-core"], capture_output=True, text=True, check=True
    )
    assert "_luce_core_completion" in defined.stdout


@pytest.mark.parametrize(
    ("words", "offered"),
    [
        ("luce-core de", ["devices"]),
        ("luce-core serve --cache-type-k b", ["bf16"]),
        ("luce-core serve --cache-ty", ["--cache-type-k", "--cache-type-v"]),
        ("luce-core pull smol", ["smollm2-135m"]),
        ("luce-core serve smol", ["smollm2-135m"]),
        ("luce-core completion z", ["zsh"]),
        ("luce-core bench smol", ["smollm2-135m"]),
        ("luce-core bench --conc", ["--concurrency"]),
        ("luce-core bench --cache-type-v b", ["bf16"]),
    ],
)
def test_what_bash_is_offered(program, words, offered):
    place = str(len(words.split()) - 1)
    shown = program(_LUCE_CORE_COMPLETE="bash_complete", COMP_WORDS=words, COMP_CWORD=place)
    lines = [line.partition(",")[2] for line in shown.out.splitlines() if line.startswith("plain,")]
    assert lines == offered
