"""Read-only checks of a store, giving typed findings."""

from asymcheck.verify.checker import UNCHECKED, Finding, Severity, verify

__all__ = ["UNCHECKED", "Finding", "Severity", "verify"]
