"""Bounds on what unpickling an untrusted file costs. The pickle is scanned first, and nothing is built.

A pickle of a few kilobytes can describe millions of tensors, tuples that contain each other so often that hashing one
takes years, and tuples that are nested so deeply that hashing one overflows the stack of the process. Compression makes
such files even smaller.
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
    **dict.fromkeys(b"N\x88\x89)}\x8f", 0),
    ord("K"): 1,
    ord("M"): 2,
    ord("J"): 4,
    ord("G"): 8,
}
_TUPLES: Final = {0x85: 1, 0x86: 2, 0x87: 3}  # values of a tuple, by operation
_LENGTHS: Final = {ord("X"): "<I", ord("U"): "<B", 0x8A: "<B", 0x8C: "<B"}  # form of the length of a string or integer
_GETS: Final = {ord("h"): "<B", ord("j"): "<I"}
_PUTS: Final = {ord("q"): "<B", ord("r"): "<I"}
_SKIPPED: Final = {0x80: 1, 0x95: 8}  # bytes of the argument of each operation without effect
_MEMOIZE: Final = 0x94
_STACK_GLOBAL: Final = 0x93
_FLAT: Final = (0, 0)  # stands for a value other than a tuple: depth and size of nested tuples
_LIST: Final = (-2, 0)  # stands for a list
_CLASS: Final = (-1, 0)  # stands for a class or function on the stack
_CHEAP: Final = ("collections", "builtins", "_codecs")


class PickleScan(NamedTuple):
    """Result of a scan."""

    end: int  # offset of the first byte after the pickle
    classes: frozenset[str]  # dotted names of all classes and functions
    problem: str  # reason to refuse the file, or empty
    foreign_appends: tuple[int, ...]
    """Offsets of the operations that append to an object other than a list."""
    is_whole: bool
    """False if the pickle ends early, or has an operation that torch does not write."""


def tensors_max(file_bytes: int) -> int:
    """Return the number of tensors that a file of this size may describe."""
    return _TENSORS_MAX + file_bytes // _TENSOR_BYTES


def scan_pickle(content: bytes, start: int, file_bytes: int, tensors: int | None = None) -> PickleScan:
    """Scan the pickle that begins at byte ``start``, as ``torch.save`` or ``torch.distributed.checkpoint`` writes it.

    The scan ends at the first operation that neither writes. ``torch.load(weights_only=True)`` refuses it, too.

    Args:
        content: the bytes.
        start: first byte of the pickle.
        file_bytes: size of the file [B].
        tensors: the number of tensors and objects that the file may describe, by default :func:`tensors_max`.
    """
    scan = _Scan(content, start, file_bytes, tensors_max(file_bytes) if tensors is None else tensors)
    try:
        problem = scan.run()
        is_whole = bool(problem) or content[scan.position - 1] == ord(".")
    except (LookupError, struct.error, ValueError):
        problem, is_whole = "", False  # Torch reports a damaged pickle itself, at the same operation.
    return PickleScan(scan.position, frozenset(scan.classes), problem, tuple(scan.foreign_appends), is_whole)


def without_appends(content: bytes, appends: tuple[int, ...]) -> bytes:
    """Return a pickle with these operations replaced by others that pass the values to ``__setstate__``.

    Torch appends only to lists, and not to stand-ins for a deque or for an object of a subclass of list.
    """
    pieces, start = [], 0
    for position in appends:
        pieces += [content[start:position], b"b" if content[position] == ord("a") else b"tb"]
        start = position + 1
    return b"".join((*pieces, content[start:]))


class _Scan:
    """Interpreter that replaces each value by the depth and the size of its tuples."""

    def __init__(self, content: bytes, start: int, file_bytes: int, tensors: int) -> None:
        self.position = start
        self.classes: set[str] = set()
        self.foreign_appends: list[int] = []
        self._content = content
        self._number_max = self._values_left = _VALUES_MAX + file_bytes
        self._objects_left = tensors
        self._names = 0
        self._stack: list[tuple[int, int]] = []
        self._outer: list[list[tuple[int, int]]] = []
        self._memo: dict[int, tuple[int, int]] = {}

    def run(self) -> str:
        content, operation = self._content, 0
        while operation != ord("."):
            operation = content[self.position]
            self.position += 1
            size = _CONSTANTS.get(operation)
            if size is not None:
                self.position += size
                self._stack.append(_FLAT)
            elif operation in _LENGTHS:
                length = self._number(_LENGTHS[operation])
                self.position += length
                self._stack.append(_FLAT)
            elif operation in _GETS:
                self._stack.append(self._memo[self._number(_GETS[operation])])
            elif operation in _PUTS:
                self._put(self._number(_PUTS[operation]))
            elif not self._apply(operation):
                return ""
            self._values_left -= 1
            if self._values_left < 0:
                return f"its pickle describes more than {_VALUES_MAX:,} values"
            if self._objects_left < 0:
                return f"it describes more than {_TENSORS_MAX:,} tensors or objects, and most of them are tiny"
            if self._stack and self._stack[-1][0] > _DEPTH_MAX:
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
            self._push_tuple([stack.pop() for _ in range(_TUPLES[operation])])
        elif operation == ord("t"):
            self._push_tuple(self._pop_mark())
        elif operation in b"]ea":
            self._apply_to_list(operation)
        elif operation == ord("u"):
            self._pop_mark()
        elif operation in b"sb":
            self._objects_left -= operation == ord("b")
            del stack[-2 if operation == ord("s") else -1 :]
        elif operation in b"R\x81":
            arguments = stack.pop()
            self._objects_left -= stack[-1] == _CLASS
            stack[-1] = max(_FLAT, arguments)
        elif operation == ord("Q"):
            stack[-1] = _FLAT
        elif operation in _SKIPPED:
            self.position += _SKIPPED[operation]
        else:
            return self._apply_name(operation)
        return True

    def _apply_to_list(self, operation: int) -> None:
        if operation == ord("]"):
            self._stack.append(_LIST)
            return
        if operation == ord("e"):
            self._pop_mark()
        else:
            self._stack.pop()
        if self._stack[-1] is not _LIST:
            self.foreign_appends.append(self.position - 1)

    def _apply_name(self, operation: int) -> bool:
        """Apply an operation that names a class or the last value; return False for other operations."""
        if operation == _MEMOIZE:
            self._put(len(self._memo))
        elif operation == _STACK_GLOBAL:
            self._stack.pop()
            self._stack[-1] = _CLASS
            self._names += 1
        elif operation == ord("c"):
            module, name = self._line(), self._line()
            # Protocol 2 uses the names of Python 2.
            module, name = NAME_MAPPING.get((module, name), (IMPORT_MAPPING.get(module, module), name))
            self.classes.add(f"{module}.{name}")
            self._names += 1
            self._stack.append(_FLAT if module in _CHEAP else _CLASS)
        else:
            return False
        return True

    def _put(self, number: int) -> None:
        self._memo[number] = self._stack[-1]
        if number > self._number_max:
            # Python would reserve memory for all smaller numbers.
            self._values_left = 0

    def _push_tuple(self, items: list[tuple[int, int]]) -> None:
        depth = 1 + max((depth for depth, _ in items), default=0)
        size = 1 + sum(size for _, size in items)
        # Shared tuples count each time, because Python visits them each time that it hashes the new tuple.
        self._values_left -= size
        self._stack.append((max(1, depth), size))

    def _pop_mark(self) -> list[tuple[int, int]]:
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
