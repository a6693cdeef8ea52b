"""The first tier: a bounded buffer in a device's memory, and the way from there to the ring."""

from asymcheck.tiers.gpu_staging.cuda import catch_up, cuda_link
from asymcheck.tiers.gpu_staging.link import Link, Mark
from asymcheck.tiers.gpu_staging.staging import Region, Staging

__all__ = ["Link", "Mark", "Region", "Staging", "catch_up", "cuda_link"]
