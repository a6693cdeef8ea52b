"""Conversion between nested states and named tensors, and the plan that splits tensors into partitions."""
