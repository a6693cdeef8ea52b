"""The way down: capture, encode, flush, commit; and collection of what nothing names any more."""
