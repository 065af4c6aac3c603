"""Layers for `--deterministic`: a row's bits depend on nothing but the row and the text before it.

Not on the other rows of a batch, their number, the width of a verified tree, how a prompt was cut into
chunks, or how large a block table is. So every sum has one order: cuts follow places in the text, never
counts of rows, and a kernel is chosen by the shape of the weights alone.
"""
