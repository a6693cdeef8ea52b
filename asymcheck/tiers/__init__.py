"""Tiers: places where frames, packs and manifests lie. They know nothing of models or of one another."""
