"""Glimmer, an architecture nobody trained: what a stranger writes to add a model to luce-core."""
