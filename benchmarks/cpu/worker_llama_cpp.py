"""The same commands as `worker_luce.py`, answered by llama-cpp-python through its low-level calls."""

from __future__ import annotations

import ctypes
import json
import os
import sys
import time
from typing import Any


def rss() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGESIZE")


def main() -> None:
    asked = json.loads(sys.argv[1])
    import llama_cpp
    import numpy as np

    before = rss()
    side = Side(llama_cpp, np, asked)
    system = llama_cpp.llama_print_system_info().decode()
    print(
        json.dumps(
            {
                "engine": f"llama-cpp-python {llama_cpp.__version__}",
                "system": system,
                "threads": llama_cpp.llama_n_threads(side.ctx),
                "repack": asked["repack"],
                "kv": asked["kv"],
                "context": asked["context"],
                "model": asked["model"],
                "imports_bytes": before,
            }
        ),
        flush=True,
    )
    for line in sys.stdin:
        command = json.loads(line)
        print(json.dumps(getattr(side, command.pop("do"))(**command)), flush=True)


class Side:
    def __init__(self, lib: Any, np: Any, asked: dict[str, Any]) -> None:
        self.lib, self.np = lib, np
        lib.llama_backend_init()
        quiet = lib.llama_log_callback(lambda level, text, data: None)
        self._quiet = quiet
        lib.llama_log_set(quiet, ctypes.c_void_p(0))
        how = lib.llama_model_default_params()
        how.use_extra_bufts = asked["repack"]
        self.model = lib.llama_model_load_from_file(asked["model"].encode(), how)
        if not self.model:
            raise SystemExit(f"llama.cpp cannot load {asked['model']!r}")
        params = lib.llama_context_default_params()
        params.n_ctx = asked["context"]
        params.n_batch = params.n_ubatch = 512
        params.n_threads = params.n_threads_batch = asked["threads"]
        kind = {"f16": 1, "f32": 0, "bf16": 30}[asked["kv"]]
        params.type_k = params.type_v = kind
        params.flash_attn_type = lib.LLAMA_FLASH_ATTN_TYPE_ENABLED  # as ours: no scores are written out
        self.ctx = lib.llama_init_from_model(self.model, params)
        self.vocab = lib.llama_vocab_n_tokens(lib.llama_model_get_vocab(self.model))

    def _decode(self, tokens: list[int]) -> Any:
        array = (self.lib.llama_token * len(tokens))(*tokens)
        code = self.lib.llama_decode(self.ctx, self.lib.llama_batch_get_one(array, len(tokens)))
        if code:
            raise SystemExit(f"llama_decode returned {code}")
        pointer = self.lib.llama_get_logits_ith(self.ctx, -1)
        return self.np.ctypeslib.as_array(pointer, (self.vocab,))

    def reset(self, tokens: list[int]) -> float:
        self.lib.llama_memory_clear(self.lib.llama_get_memory(self.ctx), True)
        for start in range(0, len(tokens), 512):
            self._decode(tokens[start : start + 512])
        return 0.0

    def prefill(self, tokens: list[int]) -> float:
        start = time.perf_counter()
        int(self._decode(tokens).argmax())
        return time.perf_counter() - start

    def decode(self, token: int, count: int) -> list[float]:
        times = []
        for _ in range(count):
            start = time.perf_counter()
            token = int(self._decode([token]).argmax())
            times.append(time.perf_counter() - start)
        return times

    def teacher(self, tokens: list[int], out: str, prompt: int) -> float:
        self.reset(tokens[: prompt - 1])
        rows = [self._decode([token]).copy() for token in tokens[prompt - 1 :]]
        self.np.save(out, self.np.stack(rows))
        return 0.0

    def memory(self) -> dict[str, int]:
        uss = 0
        with open("/proc/self/smaps_rollup") as file:
            for line in file:
                if line.startswith(("Private_Clean", "Private_Dirty")):
                    uss += int(line.split()[1]) * 1024
        return {"rss": rss(), "uss": uss}


if __name__ == "__main__":
    main()
