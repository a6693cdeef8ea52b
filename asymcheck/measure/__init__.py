"""Measuring the machine and the drive of a store: facts for the policies, which only decide."""

from asymcheck.measure.machine import NOISE, measure, noise_samples

__all__ = ["NOISE", "measure", "noise_samples"]
