"""Copies of checkpoints between a local store and remote locations: push, pull, and background push."""
