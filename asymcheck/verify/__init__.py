"""Read-only checks of a store, giving typed findings."""

from asymcheck.verify.checker import verify
from asymcheck.verify.findings import Finding, Severity

__all__ = ["Finding", "Severity", "verify"]
