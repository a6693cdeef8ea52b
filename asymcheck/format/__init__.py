"""The store format of SPEC.md in code: encode and decode files, records and names.

Decoding functions take ``where``, the name of the structure in error messages. They raise a FormatError if the bytes
break a rule. Times (``created_ns``) are nanoseconds since 1970-01-01 UTC. ``writer`` is a program's name and version.
"""
