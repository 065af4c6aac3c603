"""Qwen3.5, 3.6 and 3.8: `hooks` declares them, `params` and `describe` read a header, `network` runs."""
