"""Several ranks, each a process, save and restore one state together."""
