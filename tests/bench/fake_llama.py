"""A `llama_cpp` that computes nothing: its best next token is the last one plus one. And a Python that
has it.
"""

import stat
import sys
from pathlib import Path

MODULE = """
import ctypes
from types import SimpleNamespace

__version__ = "0.0.fake"
LLAMA_FLASH_ATTN_TYPE_ENABLED = 1
VOCAB = 300
llama_token = ctypes.c_int32
log = []
state = SimpleNamespace(last=0, stubborn=False)


def llama_backend_init(): pass
def llama_log_callback(function): return function
def llama_log_set(function, data): pass
def llama_model_default_params(): return SimpleNamespace()
def llama_context_default_params(): return SimpleNamespace()
def llama_print_system_info(): return b"fake"
def llama_get_memory(ctx): return ctx
def llama_model_get_vocab(model): return model
def llama_vocab_n_tokens(vocab): return VOCAB
def llama_n_threads(ctx): return ctx.n_threads
def llama_n_ctx(ctx): return ctx.n_ctx
def llama_n_ubatch(ctx): return ctx.n_ubatch
def llama_init_from_model(model, params): return params
def llama_batch_get_one(array, count): return list(array)[:count]


def llama_model_load_from_file(path, params):
    with open(path, "rb") as file:
        return None if file.read(3) == b"not" else params


def llama_decode(ctx, tokens):
    assert len(tokens) <= ctx.n_batch
    log.append(("decode", tokens))
    state.last = tokens[-1]
    return 0


def llama_get_logits_ith(ctx, place):
    logits = (ctypes.c_float * VOCAB)()
    logits[(state.last + 1) % VOCAB] = 1.0
    state.logits = logits
    return ctypes.cast(logits, ctypes.POINTER(ctypes.c_float))


def llama_memory_clear(memory, data): log.append(("clear",))


def llama_memory_seq_rm(memory, seq, start, stop):
    if not state.stubborn:
        log.append(("keep", start))
    return not state.stubborn
"""

RUN = """
import runpy, sys
sys.path.insert(0, {folder!r})
import llama_cpp
script = sys.argv[2]  # behind -I
sys.argv = sys.argv[2:]
names = runpy.run_path(script)
side = names["Side"]
side.fake_log = lambda self: llama_cpp.log
side.fake_stubborn = lambda self: setattr(llama_cpp.state, "stubborn", True)
names["main"]()
"""


def write_fake_python(folder: Path) -> str:
    """A program that takes what a Python takes, and has a `llama_cpp`."""
    (folder / "llama_cpp.py").write_text(MODULE)
    program = folder / "fake-python"
    program.write_text(f"#!{sys.executable}\n{RUN.format(folder=str(folder))}")
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    return str(program)
