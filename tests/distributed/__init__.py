"""Tests of several ranks, each a process, that save and restore one state together."""
