"""Merging of checkpoints: formulas, streaming, and the search for good weights."""

METHODS = ("mean", "ema", "wsm", "lawa", "weighted", "slerp", "ties", "dare")
"""Names of the methods."""
SCHEDULES = ("linear", "cosine", "1-sqrt")
"""Decays of the learning rate that ``wsm`` emulates."""
