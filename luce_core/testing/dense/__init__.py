"""A small transformer written with ops only: what op layers are tested under, without any architecture
plugin.

Its hooks are `luce_core.testing.dense.hooks`; the weights may have any block format.
"""

from luce_core.testing.dense.model import write_dense_model

__all__ = ["write_dense_model"]
