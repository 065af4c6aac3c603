"""An image encoder for tests: every square of pixels through one matrix. Goes with any model as wide as
its file says, and waits between pieces of work wherever a test wants to look.
"""

from luce_core.testing.pictures.model import write_picture_model

__all__ = ["write_picture_model"]
