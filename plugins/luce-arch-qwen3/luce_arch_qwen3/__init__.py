"""Qwen3, dense and with experts: `hooks` declares them, `describe` reads a header, `network` runs."""
