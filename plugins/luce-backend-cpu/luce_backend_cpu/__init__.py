"""The CPU as a device of luce-core, with three tiers of speed behind the same ops."""
