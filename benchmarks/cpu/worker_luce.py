"""One model in one process, driven over lines of JSON: this side of `compare.py` and `accuracy.py`."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import psutil


def main() -> None:
    asked = json.loads(sys.argv[1])
    import torch

    from luce_core.bench.facts import has_fused_attention
    from luce_core.bench.peer import file_identity
    from luce_core.testing.rig import ModelRig

    torch.set_num_threads(asked["threads"])
    before = psutil.Process().memory_info().rss
    path = Path(asked["model"])
    block = 32
    rig = ModelRig(
        path,
        "luce_arch_llama.hooks",
        "luce_backend_cpu.hooks",
        layers=asked["layers"],
        num_slots=2,
        num_blocks=-(-asked["context"] // block) + 1,
        block_tokens=block,
        cache_type=asked["k_type"],
    )
    side = Side(rig)
    kv_bytes = sum(tensor.numel() * tensor.element_size() for tensor in rig.model.state.tensors())
    conditions = {
        "file": file_identity(path),
        "k_type": asked["k_type"],
        "v_type": asked["v_type"],
        "flash_attention": has_fused_attention(rig.registry, asked["layers"]),
        "threads": torch.get_num_threads(),
        "context": asked["context"],
    }
    answer({**conditions, "engine": engine(asked), "imports_bytes": before, "kv_bytes": kv_bytes})
    for line in sys.stdin:
        command = json.loads(line)
        answer(getattr(side, command.pop("do"))(**command))


def answer(value: Any) -> None:
    print(json.dumps(value), flush=True)


def engine(asked: dict[str, Any]) -> str:
    from importlib.metadata import version

    import torch

    layers = "+".join(asked["layers"]) or "reference"
    return f"luce-core {version('luce-core')}, torch {torch.__version__}, ops {layers}"


class Side:
    """The commands. Times in seconds."""

    def __init__(self, rig: Any) -> None:
        self.rig = rig
        self.seq: int | None = None

    def reset(self, tokens: list[int]) -> float:
        """A new sequence holding these tokens."""
        if self.seq is not None:
            self.rig.close(self.seq)
        self.seq = self.rig.open()
        for start in range(0, len(tokens), 512):
            self._chunk(tokens[start : start + 512])
        return 0.0

    def _chunk(self, tokens: list[int]) -> Any:
        from luce_core.model.batch import make_batch

        rows = [self.rig._rows(self.seq, tokens, wanted=[len(tokens) - 1])]
        logits = self.rig.backend.head(self.rig.backend.forward(make_batch("prefill", rows)).final)
        self.rig.blocks.advance(self.seq, tokens)
        return logits

    def prefill(self, tokens: list[int]) -> float:
        """One chunk, and the logits of its last row."""
        start = time.perf_counter()
        int(self._chunk(tokens)[0].argmax())
        return time.perf_counter() - start

    def decode(self, token: int, count: int) -> list[float]:
        """Greedy tokens, one at a time."""
        times = []
        for _ in range(count):
            start = time.perf_counter()
            token = int(self.rig.decode(self.seq, token).argmax())
            times.append(time.perf_counter() - start)
        return times

    def greedy(self, token: int, count: int) -> list[int]:
        """The tokens themselves."""
        found = []
        for _ in range(count):
            token = int(self.rig.decode(self.seq, token).argmax())
            found.append(token)
        return found

    def teacher(self, tokens: list[int], out: str, prompt: int) -> float:
        """Logits of every position from `prompt` - 1 on, fed token by token -> .npy file."""
        import numpy as np
        import torch

        self.reset(tokens[: prompt - 1])
        rows = [self.rig.decode(self.seq, token) for token in tokens[prompt - 1 :]]
        np.save(out, torch.stack(rows).numpy())
        return 0.0

    def memory(self) -> dict[str, int]:
        info = psutil.Process().memory_full_info()
        return {"rss": info.rss, "uss": info.uss}


if __name__ == "__main__":
    main()
