"""Several ranks, each a process of its own, that save and restore one state together."""
