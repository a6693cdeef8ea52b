"""Bounds on what unpickling an untrusted file costs. The pickle is scanned first, and nothing is built.

A pickle of a few kilobytes can describe millions of tensors, and tuples that are nested so deeply that hashing one of
them overflows the stack of the process. Compression makes such files even smaller.
"""

from __future__ import annotations

import struct
from _compat_pickle import IMPORT_MAPPING, NAME_MAPPING
from typing import Any, Final, NamedTuple

_VALUES_MAX: Final = 500_000
"""Values that a pickle of any size may describe. Each further value needs one byte of the file."""
_TENSORS_MAX: Final = 20_000
"""Tensors and objects of other classes that a file of any size may describe.

Each further tensor needs :data:`_TENSOR_BYTES` of the file.
"""
_TENSOR_BYTES: Final = 1024
_DEPTH_MAX: Final = 1000
"""Maximum nesting of tuples. Python hashes nested tuples recursively, without a check of the stack."""
_CLASSES_MAX: Final = 500
"""Names of classes and functions in a pickle. ``torch.save`` writes each name once."""

# Bytes of the argument of each operation that pushes a value without a reference to other values.
_CONSTANTS: Final = {
    **dict.fromkeys(b"N\x88\x89)]}\x8f", 0),
    ord("K"): 1,
    ord("M"): 2,
    ord("J"): 4,
    ord("G"): 8,
}
_TUPLES: Final = {0x85: 1, 0x86: 2, 0x87: 3}  # values of a tuple, by operation
_LENGTHS: Final = {ord("X"): "<I", ord("U"): "<B", 0x8A: "<B"}  # form of the length of a string or a large integer
_GETS: Final = {ord("h"): "<B", ord("j"): "<I"}
_PUTS: Final = {ord("q"): "<B", ord("r"): "<I"}
_PROTOCOL: Final = 0x80
_CLASS: Final = -1  # stands for a class or function on the stack; all other values are depths of tuples
_CHEAP: Final = ("collections", "builtins", "_codecs")


class PickleScan(NamedTuple):
    """Result of a scan."""

    end: int  # offset of the first byte after the pickle
    classes: frozenset[str]  # dotted names of all classes and functions
    problem: str  # reason to refuse the file, or empty
    is_whole: bool  # False if the pickle ends early


def tensors_max(file_bytes: int) -> int:
    """Return the number of tensors that a file of this size may describe."""
    return _TENSORS_MAX + file_bytes // _TENSOR_BYTES


def scan_pickle(content: bytes, start: int, file_bytes: int) -> PickleScan:
    """Scan the pickle of protocol 2 that begins at byte ``start``, as ``torch.save`` writes it.

    The scan ends at the first operation that ``torch.load(weights_only=True)`` refuses.
    """
    scan = _Scan(content, start, file_bytes)
    try:
        problem, is_whole = scan.run(), True
    except (LookupError, struct.error, ValueError):
        problem, is_whole = "", False  # Torch reports a damaged pickle itself, at the same operation.
    return PickleScan(scan.position, frozenset(scan.classes), problem, is_whole)


class _Scan:
    """Interpreter that replaces each value by the depth of its tuples."""

    def __init__(self, content: bytes, start: int, file_bytes: int) -> None:
        self.position = start
        self.classes: set[str] = set()
        self._content = content
        self._values_left = _VALUES_MAX + file_bytes
        self._objects_left = tensors_max(file_bytes)
        self._names = 0
        self._stack: list[int] = []
        self._outer: list[list[int]] = []
        self._memo: dict[int, int] = {}

    def run(self) -> str:
        content, operation = self._content, 0
        while operation != ord("."):
            operation = content[self.position]
            self.position += 1
            size = _CONSTANTS.get(operation)
            if size is not None:
                self.position += size
                self._stack.append(0)
            elif operation in _LENGTHS:
                length = self._number(_LENGTHS[operation])
                self.position += length
                self._stack.append(0)
            elif operation in _GETS:
                self._stack.append(self._memo[self._number(_GETS[operation])])
            elif operation in _PUTS:
                self._memo[self._number(_PUTS[operation])] = self._stack[-1]
            elif not self._apply(operation):
                return ""
            self._values_left -= 1
            if self._values_left < 0:
                return f"its pickle describes more than {_VALUES_MAX:,} values"
            if self._objects_left < 0:
                return f"it describes more than {_TENSORS_MAX:,} tensors or objects, and most of them are tiny"
            if self._stack and self._stack[-1] > _DEPTH_MAX:
                return f"its tuples are nested deeper than {_DEPTH_MAX:,}"
            if self._names > _CLASSES_MAX:
                return f"it names classes more than {_CLASSES_MAX:,} times"
        return ""

    def _apply(self, operation: int) -> bool:
        """Apply an operation on other values; return False for the end, and for unknown operations."""
        stack = self._stack
        if operation == ord("("):
            self._outer.append(stack)
            self._stack = []
        elif operation in _TUPLES:
            items = [stack.pop() for _ in range(_TUPLES[operation])]
            stack.append(1 + max(0, *items))
        elif operation == ord("t"):
            items = self._pop_mark()
            self._stack.append(1 + max(items, default=0))
        elif operation in b"eu":
            self._pop_mark()
        elif operation in b"asb":
            self._objects_left -= operation == ord("b")
            del stack[-2 if operation == ord("s") else -1 :]
        elif operation in b"R\x81":
            arguments = stack.pop()
            self._objects_left -= stack[-1] == _CLASS
            stack[-1] = max(0, arguments)
        elif operation == ord("Q"):
            stack[-1] = 0
        elif operation == ord("c"):
            module, name = self._line(), self._line()
            # Protocol 2 uses the names of Python 2.
            module, name = NAME_MAPPING.get((module, name), (IMPORT_MAPPING.get(module, module), name))
            self.classes.add(f"{module}.{name}")
            self._names += 1
            stack.append(0 if module in _CHEAP else _CLASS)
        elif operation == _PROTOCOL:
            self.position += 1
        else:
            return False
        return True

    def _pop_mark(self) -> list[int]:
        items = self._stack
        self._stack = self._outer.pop()
        return items

    def _number(self, form: str) -> int:
        number: Any
        (number,) = struct.unpack_from(form, self._content, self.position)
        self.position += struct.calcsize(form)
        return int(number)

    def _line(self) -> str:
        end = self._content.index(b"\n", self.position)
        line = self._content[self.position : end].decode()
        self.position = end + 1
        return line
