"""Policies: pure decisions about moving bytes between tiers, made from measured facts."""
