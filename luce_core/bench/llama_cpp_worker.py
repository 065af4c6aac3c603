"""llama-cpp-python as a worker: commands in, answers out, one line of JSON each; times in seconds.

Runs in the Python of another environment, so it imports nothing of ours and nothing beyond that package's own
needs. Its one argument: model, threads, k_type, v_type, context, chunk, repack.
"""

from __future__ import annotations

import ctypes
import json
import os
import sys
import time
from typing import Any

TYPES = {"f32": 0, "f16": 1, "q4_0": 2, "q4_1": 3, "q5_0": 6, "q5_1": 7, "q8_0": 8, "bf16": 30}
"""ggml's numbers of the types a cache may have."""


def rss() -> int:
    """Resident bytes of this process; 0 where /proc does not say."""
    if not os.path.exists("/proc/self/statm"):
        return 0
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGESIZE")


def main() -> None:
    """Load, say so, answer until the input ends."""
    asked = json.loads(sys.argv[1])
    import llama_cpp
    import numpy as np

    before = rss()
    side = Side(llama_cpp, np, asked)
    answer({**side.about(asked), "imports_bytes": before})
    for line in sys.stdin:
        command = json.loads(line)
        answer(getattr(side, command.pop("do"))(**command))


def answer(value: Any) -> None:
    """One line."""
    sys.stdout.write(json.dumps(value) + "\n")
    sys.stdout.flush()


class Side:
    """The commands. One sequence."""

    def __init__(self, lib: Any, np: Any, asked: dict[str, Any]) -> None:
        self.lib, self.np = lib, np
        self.chunk: int = asked["chunk"]
        self.held: list[int] = []
        lib.llama_backend_init()
        self._quiet = lib.llama_log_callback(lambda level, text, data: None)
        lib.llama_log_set(self._quiet, ctypes.c_void_p(0))
        how = lib.llama_model_default_params()
        how.use_extra_bufts = asked["repack"]
        self.model = lib.llama_model_load_from_file(asked["model"].encode(), how)
        if not self.model:
            raise SystemExit(f"llama.cpp cannot load {asked['model']!r}")
        params = lib.llama_context_default_params()
        params.n_ctx = asked["context"]
        params.n_batch = params.n_ubatch = self.chunk
        params.n_threads = params.n_threads_batch = asked["threads"]
        params.type_k, params.type_v = TYPES[asked["k_type"]], TYPES[asked["v_type"]]
        params.flash_attn_type = lib.LLAMA_FLASH_ATTN_TYPE_ENABLED
        self.ctx = lib.llama_init_from_model(self.model, params)
        if not self.ctx:
            raise SystemExit("llama.cpp cannot make a context with flash attention and these types")
        self.params = params
        self.memory_of = lib.llama_get_memory(self.ctx)
        self.vocab: int = lib.llama_vocab_n_tokens(lib.llama_model_get_vocab(self.model))

    def about(self, asked: dict[str, Any]) -> dict[str, Any]:
        """Conditions as they are here, not as they were asked for, where llama.cpp tells."""
        names = {number: name for name, number in TYPES.items()}
        real = os.path.realpath(asked["model"])
        seen = os.stat(real)
        return {
            "engine": f"llama-cpp-python {self.lib.__version__}",
            "system": self.lib.llama_print_system_info().decode(),
            "file": f"{real} ({seen.st_size} bytes, changed {seen.st_mtime_ns})",
            "threads": self.lib.llama_n_threads(self.ctx),
            "context": self.lib.llama_n_ctx(self.ctx),
            "k_type": names[self.params.type_k],
            "v_type": names[self.params.type_v],
            "flash_attention": self.params.flash_attn_type == self.lib.LLAMA_FLASH_ATTN_TYPE_ENABLED,
            "chunk": self.lib.llama_n_ubatch(self.ctx),
            "repack": asked["repack"],
            "vocab": self.vocab,
        }

    def _decode(self, tokens: list[int]) -> Any:
        array = (self.lib.llama_token * len(tokens))(*tokens)
        code = self.lib.llama_decode(self.ctx, self.lib.llama_batch_get_one(array, len(tokens)))
        if code:
            raise SystemExit(f"llama_decode returned {code}")
        self.held += tokens

    def _logits(self) -> Any:
        pointer = self.lib.llama_get_logits_ith(self.ctx, -1)
        return self.np.ctypeslib.as_array(pointer, (self.vocab,))

    def reset(self, tokens: list[int]) -> int:
        """A sequence of these tokens; returns how many of them were there and stayed."""
        kept = len(tokens) if self.held[: len(tokens)] == tokens else 0
        if not kept or not self.lib.llama_memory_seq_rm(self.memory_of, 0, kept, -1):
            self.lib.llama_memory_clear(self.memory_of, True)
            kept = 0
        self.held = self.held[:kept]
        for start in range(kept, len(tokens), self.chunk):
            self._decode(tokens[start : start + self.chunk])
        return kept

    def prefill(self, tokens: list[int]) -> float:
        """More tokens, and the best one behind the last of them."""
        start = time.perf_counter()
        for first in range(0, len(tokens), self.chunk):
            self._decode(tokens[first : first + self.chunk])
        int(self._logits().argmax())
        return time.perf_counter() - start

    def decode(self, token: int, count: int) -> list[float]:
        """Greedy tokens, one at a time: the time of each."""
        times = []
        for _ in range(count):
            start = time.perf_counter()
            self._decode([token])
            token = int(self._logits().argmax())
            times.append(time.perf_counter() - start)
        return times

    def teacher(self, tokens: list[int], out: str, prompt: int) -> float:
        """Logits of every position from `prompt` - 1 on, fed token by token -> .npy file."""
        self.reset(tokens[: prompt - 1])
        rows = []
        for token in tokens[prompt - 1 :]:
            self._decode([token])
            rows.append(self._logits().copy())
        self.np.save(out, self.np.stack(rows))
        return 0.0

    def memory(self) -> dict[str, int]:
        """Resident bytes, and those no other process shares."""
        private = 0
        if os.path.exists("/proc/self/smaps_rollup"):
            with open("/proc/self/smaps_rollup") as file:
                for line in file:
                    if line.startswith(("Private_Clean", "Private_Dirty")):
                        private += int(line.split()[1]) * 1024
        return {"rss": rss(), "uss": private}


if __name__ == "__main__":
    main()
