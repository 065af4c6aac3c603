"""What the program logs: one line per record on standard error, the same in every process of it."""

from __future__ import annotations

import logging
import sys


def set_up_logging(level: str) -> None:
    """level: "debug", "info", "warning" or "error". A second call changes nothing."""
    logging.basicConfig(
        stream=sys.stderr,
        level=level.upper(),
        format="%(asctime)s %(levelname)s %(name)s: %(message)s",
        datefmt="%H:%M:%S",
    )
