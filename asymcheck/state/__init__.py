"""Nested state to named tensors and plain values and back, and the plan that cuts tensors into partitions."""
