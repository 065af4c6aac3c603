"""By hand: schemathesis against a toy server for as long as you like.

    python tests/fuzz/fuzz_api.py --max-time 600
    python tests/fuzz/fuzz_api.py --max-examples 200 --seed 7 --include-path /v1/completions

Arguments go to `schemathesis run`. Says what was found, and whether the server was well and clean afterwards.
"""

import json
import subprocess
import sys
import tempfile
import urllib.request
from pathlib import Path

import torch

from luce_core.testing.pipeline import make_pipeline
from luce_core.testing.server import serving
from luce_core.testing.toy import write_toy_model

CONTEXT = 48  # keeps answers short where the request sets no length
CONFIG = Path(__file__).with_name("schemathesis.toml")


def main(arguments: list[str]) -> int:
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        path = write_toy_model(Path(folder) / "toy.gguf", salt=7, context=CONTEXT)
        with serving(make_pipeline(path)) as served:
            command = [sys.executable, "-m", "schemathesis.cli", "--config-file", str(CONFIG), "run"]
            command += [f"{served.url}/openapi.json", "--request-timeout", "60", *arguments]
            status = subprocess.run(command, check=False).returncode
            with urllib.request.urlopen(f"{served.url}/health", timeout=60) as answer:
                health = json.load(answer)
            served.engine.blocks.check_integrity()
            used = served.engine.blocks.stats().used_blocks
            print(f"health {health}, used blocks {used}, requests {len(served.records)}")
            clean = health["status"] == "ok" and not health["running"] and not any(used.values())
    return status or (0 if clean else 1)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
