"""Record what the float64 oracle says of the small V4.1 models: `tests/fixtures/v41.npz`, `tiny-
deepseek41.gguf`.

    python plugins/luce-arch-deepseek4/tools/record_v41.py

Only for when the oracle or the models change. Prints how far each logit deviates, and how close choices
were: a choice closer than 32-bit numbers can tell would make the record useless, so it is refused.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from tests.models_v41 import (  # noqa: E402
    BASE,
    CASES,
    STORED,
    digest,
    model_of,
    quant_of,
    random_tensors,
    text_of,
    written,
)
from tests.oracle_v41 import Oracle  # noqa: E402

FIXTURES = ROOT / "tests" / "fixtures"
Tensors = Mapping[str, npt.NDArray[np.float32]]
SMALLEST_MARGIN = 2e-5


def read(path: Path) -> Tensors:
    """Every tensor of a file, as its author's package decodes it."""
    return {
        tensor.name: gguf.dequantize(tensor.data, tensor.tensor_type).reshape(tensor.shape[::-1])
        for tensor in gguf.GGUFReader(path).tensors
    }


def recorded(name: str, keys: Mapping[str, Any], tensors: Tensors) -> npt.NDArray[np.float32]:
    oracle = Oracle(keys, tensors)
    logits = oracle.run(text_of())
    print(f"{name:45} deviation {logits.std():.2f}, closest choice {oracle.margin:.1e}")  # noqa: T201
    if oracle.margin < SMALLEST_MARGIN:
        sys.exit(f"Model {name!r} chooses too closely; give it another seed.")
    return logits.astype(np.float32)


def main() -> None:
    found = {}
    for name in CASES:
        keys, tensors = model_of(name)
        found[name] = recorded(name, keys, tensors)
        found[f"{name}: digest"] = np.array(digest(tensors))
    keys = {**BASE, **STORED}
    tensors = random_tensors(keys)
    quant = {name: quant_of(name, tensor.shape) for name, tensor in tensors.items()}
    path = written(FIXTURES / "tiny-deepseek41.gguf", keys, tensors, quant=quant)
    logits = recorded("stored", keys, read(path))
    np.savez_compressed(path.with_suffix(".npz"), input_ids=text_of(), logits=logits)
    np.savez_compressed(FIXTURES / "v41.npz", **found)
    for made in ("v41.npz", path.name, path.with_suffix(".npz").name):
        print(f"{made}: {(FIXTURES / made).stat().st_size / 1024:.0f} KiB")  # noqa: T201


if __name__ == "__main__":
    main()
