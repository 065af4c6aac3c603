"""What a header may ask for. Each limit sits far above any real model and keeps a hostile file's cost small.

Every count is also checked against the bytes that are left in the file, so most lies end there first.
"""

from __future__ import annotations

from typing import Final

MAX_HEADER_BYTES: Final = 128 << 20
"""Metadata and tensor table of one file. 262,144 tokens, their scores and types, 500,000 merges: about 15 MB.

Reading a header takes at most five times its bytes: Python keeps a string with one emoji at four bytes a
character.
"""

MAX_METADATA_PAIRS: Final = 16_384
"""Keys of one file. Real files hold 20 to 80."""

MAX_KEY_BYTES: Final = 65_535
"""The format's own limit for a metadata key."""

MAX_STRING_BYTES: Final = 64 << 20
"""One string. The longest are whole `tokenizer.json` files that some converters embed, up to about 35 MB."""

MAX_ARRAY_ELEMENTS: Final = 1 << 22
"""Elements of all arrays of one file together. The vocabulary above has 1.3 million."""

MAX_NESTED_ARRAYS: Final = 4_096
"""Arrays inside arrays, all together. No known model has one; each is a Python object."""

MAX_ARRAY_DEPTH: Final = 4
"""Arrays in arrays in arrays: reading them recurses."""

MAX_TENSORS: Final = 65_536
"""Tensors of a model, over all its files. The largest have about 1,500; with each expert apart, 46,000."""

MAX_TENSOR_NAME_BYTES: Final = 256
"""GGML stops at 63; converters of other projects write longer names, and nothing here minds."""

MAX_DIMS: Final = 4
"""GGML's own limit for the dimensions of a tensor."""

MAX_WEIGHTS: Final = (1 << 63) - 1
"""Weights of one tensor: what a signed 64-bit index reaches."""

MIN_ALIGNMENT: Final = 8
MAX_ALIGNMENT: Final = 65_536
"""`general.alignment`: the format wants a multiple of 8; 65,536 is the largest page of any machine served."""

MAX_SHARDS: Final = 1_024
"""Files of one split model. A model of 1 TB in files of 2 GB has 500."""
