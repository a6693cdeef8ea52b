"""Read-only reports on a store: history, inventory, disk usage, and differences between checkpoints."""
