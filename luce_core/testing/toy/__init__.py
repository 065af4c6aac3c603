"""The toy architecture: a whole plugin without floating-point luck, for tests of everything around a model.

Its next-token law is integer arithmetic over three kinds of state: pages (every visible token with its
index), a folded slot (a rolling hash), and a shift slot (the newest tokens). So a token that is lost, stale,
misplaced or folded twice changes the text for certain, and `ToyLaw` — plain Python, written without any of
the engine — is an exact oracle.
"""

from luce_core.testing.toy.law import ToyLaw
from luce_core.testing.toy.model import write_toy_model

__all__ = ["ToyLaw", "write_toy_model"]
