"""Reading GGUF model files: fast, and safe against any bytes.

`read_header` for what a model says about itself, `GgufFile.open` for its weights, `FORMATS` for how weights
are stored.
"""

from luce_core.gguf.file import GgufFile, read_header
from luce_core.gguf.formats import FORMATS, BlockFormat, FormatRegistry, declared
from luce_core.gguf.header import REQUIRED, GgufHeader, TensorInfo
from luce_core.gguf.summary import FormatTotal, MetadataRow, Summary, TensorRow, summarize
from luce_core.gguf.values import MetaValue, StringArray

__all__ = [
    "FORMATS",
    "REQUIRED",
    "BlockFormat",
    "FormatRegistry",
    "FormatTotal",
    "GgufFile",
    "GgufHeader",
    "MetaValue",
    "MetadataRow",
    "StringArray",
    "Summary",
    "TensorInfo",
    "TensorRow",
    "declared",
    "read_header",
    "summarize",
]
