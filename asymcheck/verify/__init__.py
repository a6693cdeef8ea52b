"""Read-only checks of a store, giving typed findings."""

from asymcheck.verify.checker import verify
from asymcheck.verify.findings import UNCHECKED, Finding, Severity

__all__ = ["UNCHECKED", "Finding", "Severity", "verify"]
