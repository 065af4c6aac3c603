"""A local LLM inference server made of plugins. Start reading at `hookspecs.py`."""

__version__ = "0.1.0"
