"""DeepSeek V4: `hooks` declares it, `params` and `describe` read a header, `network` runs."""
