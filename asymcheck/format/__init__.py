"""The store format, SPEC.md in code: bytes and names to values and back.

Functions that read take `where`, the name of the structure in errors, and raise the FormatError that fits when bytes
break a rule. Times (`created_ns`) are nanoseconds since 1970-01-01 UTC, `writer` is the name and version of a program.
"""
