"""Images of a request, from what the client sent to what the engine is given. Server's process; no torch."""

from luce_core.media.placing import Placed, place
from luce_core.media.reader import ImageReader

__all__ = ["ImageReader", "Placed", "place"]
