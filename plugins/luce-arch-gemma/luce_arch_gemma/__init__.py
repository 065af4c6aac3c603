"""Gemma 3 and 4: `hooks` declares them, `params` and `describe` read a header, `network` runs."""
