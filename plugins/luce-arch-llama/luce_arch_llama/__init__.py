"""Llama and Qwen2 models: `hooks` declares them, `describe` reads a header, `network` runs."""
