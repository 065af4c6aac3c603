"""Ling 3: `hooks` declares it, `params` and `describe` read a header, `network` runs."""
