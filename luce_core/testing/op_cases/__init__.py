"""Small calls of every op, the same whoever answers them: what op layers are compared on, op by op."""

from luce_core.testing.op_cases import rows, sequences, streams
from luce_core.testing.op_cases.case import CASES, OpCase, OpRun, OpWorld

__all__ = ["CASES", "OpCase", "OpRun", "OpWorld", "rows", "sequences", "streams"]
