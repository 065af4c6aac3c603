"""Coverage-guided fuzzing of the GGUF reader: whatever the bytes, a model or a ModelFormatError.

    pip install atheris
    python tests/fuzz/fuzz_gguf.py -runs=1000000

Options are libFuzzer's. Without a corpus folder the run starts from the seeds below; a crash, a hang of ten
seconds or memory beyond 1 GiB ends it and leaves the input in `crash-*`, `timeout-*` or `oom-*`: make that a
test in `tests/gguf/test_hostile.py`.
"""

from __future__ import annotations

import os
import struct
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np

if __name__ == "__main__":
    import atheris

    sys.path.insert(0, str(Path(__file__).parents[2]))
    with atheris.instrument_imports(include=["luce_core.gguf"]):
        import luce_core.gguf  # noqa: F401

from luce_core.errors import ModelFormatError
from luce_core.gguf import FORMATS, GgufFile, summarize
from luce_core.testing import gguf_raw as raw
from luce_core.testing.gguf_raw import ARCH, array, model, pair, string, tensor

MAX_INPUT_BYTES = 4096
READ_WEIGHTS = 4096  # tensors up to this size are also dequantized
LIMITS = (f"-max_len={MAX_INPUT_BYTES}", "-timeout=10", "-rss_limit_mb=1024")

DICTIONARY = [
    b"GGUF", b"general.architecture", b"general.alignment",
    b"split.no", b"split.count", b"split.tensors.count",
    *(struct.pack("<I", kind) for kind in range(14)),
    *(struct.pack("<Q", n) for n in (0, 1, 8, 2**22, 2**31, 2**32, 2**61)),
    *(struct.pack("<Q", n) for n in (2**63 - 1, 2**63, 2**64 - 8, 2**64 - 1)),
]  # fmt: skip


def one_input(data: bytes, folder: Path) -> bool:
    """Read `data` as a model, or as the two files of a split one. True if it was one.

    The first two bytes say how many bytes the second file of the set has; 0 means there is one file.
    """
    if len(data) < 2:
        return False
    second_bytes = min(struct.unpack("<H", data[:2])[0], len(data) - 2)
    first, second = folder / "m-00001-of-00002.gguf", folder / "m-00002-of-00002.gguf"
    first.write_bytes(data[2 : len(data) - second_bytes])
    second.unlink(missing_ok=True)
    if second_bytes:
        second.write_bytes(data[len(data) - second_bytes :])
    message = complaint(lambda: use(first))
    return message is None


def complaint(act: Callable[[], object]) -> str | None:
    """What `act` complains of; None if it does not."""
    try:
        act()
    except ModelFormatError as error:
        message = str(error)
    else:
        return None
    if not message.isprintable() or len(message) > 2000:
        raise AssertionError(f"not fit for a terminal: {message!r}")
    return message


def use(path: Path) -> None:
    """All that can be asked of a model. Once its header is accepted, only reads of metadata may complain."""
    with GgufFile.open(path) as file:
        message = complaint(lambda: read_all(file))
        if message is not None:
            raise AssertionError(f"an accepted model complained: {message}")


def read_all(file: GgufFile) -> None:
    header = file.header
    summary = summarize(header)
    assert summary.num_bytes == sum(info.num_bytes for info in header.tensors.values())
    assert all(row.text.isprintable() and len(row.text) <= 100 for row in summary.metadata)
    assert len(file.identity()) == 32
    for name, info in header.tensors.items():
        data = file.raw(name)
        assert data.nbytes == info.num_bytes, name
        assert data.shape == (*info.shape[:-1], info.row_bytes), name
        if info.num_weights <= READ_WEIGHTS and info.format.name != "Q8_1":
            assert file.dequantize(name).shape == info.shape, name
    reads = [header.uint, header.float, header.bool, header.str]
    reads += [header.strings, header.uints, header.floats, header.bools]
    reads += [partial(header.per_layer_uint, num_layers=3)]
    for key in header.metadata:
        for read in reads:
            complaint(partial(read, key))


def seeds() -> list[bytes]:
    """Valid inputs: every value type, every format, one file and two."""
    inner = array(raw.I32, 1, b"\1\0\0\0") + array(raw.STRING, 1, string(b"x"))
    metadata = [
        ARCH,
        pair(b"general.alignment", raw.U32, struct.pack("<I", 64)),
        pair(b"tiny.flags", raw.ARRAY, array(raw.BOOL, 2, b"\1\0")),
        pair(b"tiny.yes", raw.BOOL, b"\1"),
        pair(b"tiny.eps", raw.F32, struct.pack("<f", 1e-6)),
        pair(b"tokens", raw.ARRAY, array(raw.STRING, 3, string(b"a") + string("é".encode()) + string(b""))),
        pair(b"nested", raw.ARRAY, array(raw.ARRAY, 2, inner)),
        *(pair(b"one%d" % kind, kind, bytes(1)) for kind in (raw.U8, raw.I8)),
        *(pair(b"two%d" % kind, kind, bytes(2)) for kind in (raw.U16, raw.I16)),
        *(pair(b"eight%d" % kind, kind, bytes(8)) for kind in (raw.U64, raw.I64, raw.F64)),
    ]
    tensors = [tensor(b"w", (32, 2), 8), tensor(b"v", (3, 1, 2, 1), 0, 128)]
    singles = [
        model(),
        model(metadata, alignment=64),
        model(metadata, tensors, bytes(152), alignment=64),
    ]
    for block_format in FORMATS:
        line = tensor(b"w", (block_format.block_weights, 2), block_format.ggml_id)
        singles.append(model([], [line], bytes(2 * block_format.block_bytes)))
    return [b"\0\0" + single for single in singles] + [split_seed()]


def split_seed() -> bytes:
    def part(number: int, *extra: bytes) -> bytes:
        split = [
            pair(b"split.no", raw.U16, struct.pack("<H", number)),
            pair(b"split.count", raw.U16, struct.pack("<H", 2)),
            pair(b"split.tensors.count", raw.I32, struct.pack("<i", 2)),
        ]
        return model([*extra, *split], [tensor(b"t%d" % number, (8,))], bytes(32))

    second = part(1)
    return struct.pack("<H", len(second)) + part(0, ARCH) + second


def fuzz(argv: list[str], folder: Path) -> None:
    """Run libFuzzer, which ends the process when it is done."""
    corpus, words = folder / "corpus", folder / "words"
    corpus.mkdir()
    for index, seed in enumerate(seeds()):
        (corpus / f"seed-{index}").write_bytes(seed)
    escaped = ["".join(rf"\x{byte:02x}" for byte in word) for word in DICTIONARY]
    words.write_text("".join(f'"{word}"\n' for word in escaped))
    np.seterr(all="raise")  # arithmetic that warns where nobody meant it to is a finding
    own_corpus = [] if any(not argument.startswith("-") for argument in argv[1:]) else [str(corpus)]
    options = [argv[0], *LIMITS, f"-dict={words}", *argv[1:], *own_corpus]
    atheris.Setup(options, lambda data: one_input(data, folder))
    atheris.Fuzz()


def main(argv: list[str]) -> int:
    """Fuzz in a child process, so that the files it works on are gone afterwards; its exit status."""
    with tempfile.TemporaryDirectory(dir="/dev/shm" if Path("/dev/shm").is_dir() else None) as folder:
        child = os.fork()
        if child == 0:
            fuzz(argv, Path(folder))
        _, status = os.waitpid(child, 0)
    return os.waitstatus_to_exitcode(status)


if __name__ == "__main__":
    sys.exit(main(sys.argv))
