"""Load untrusted pickles at bounded cost, and with only those classes and functions that the caller names.

A pickle of a few kilobytes can describe millions of tensors, tuples that contain each other so often that hashing one
takes years, and tuples that are nested so deeply that hashing one overflows the stack of the process. Each of its calls
can copy the same long string or list. Compression makes such files even smaller. Therefore each pickle is scanned
before it is loaded, and the scan builds nothing.

This is the only module with an unpickler.
"""

from __future__ import annotations

import dataclasses
import io
import pickle
import pickletools
from _compat_pickle import IMPORT_MAPPING, NAME_MAPPING
from collections.abc import Callable, Sequence
from typing import Any, Final

from asymcheck.errors import StructureError, TruncatedError

_VALUES_MAX: Final = 500_000
"""Values that a pickle of any size may describe. Each further value needs one byte of the file."""
_OBJECTS_MAX: Final = 20_000
"""Tensors and objects of other classes that a file of any size may describe. Each further one needs a part of it."""
_OBJECT_BYTES: Final = 192  # torch.save() writes more for the smallest tensor
_DEPTH_MAX: Final = 1000
"""Maximum nesting of tuples. Python hashes nested tuples recursively, without a check of the stack."""
_COPIES_PER_BYTE: Final = 2
"""Characters and items that calls may copy, beyond :data:`_VALUES_MAX`, per byte of the file."""
_NAMES_MAX: Final = 500
"""Names of classes and functions in a pickle. A pickler writes each name once."""
_CHEAP: Final = ("collections ", "builtins ", "__builtin__ ", "_codecs ")
"""Modules whose objects do not count."""

_GETS: Final = frozenset({"GET", "BINGET", "LONG_BINGET"})
_PUTS: Final = frozenset({"PUT", "BINPUT", "LONG_BINPUT", "MEMOIZE"})
_TUPLES: Final = frozenset({"TUPLE", "TUPLE1", "TUPLE2", "TUPLE3"})
_CONTAINERS: Final = frozenset({"EMPTY_LIST", "EMPTY_DICT", "EMPTY_SET", "LIST", "DICT", "FROZENSET"})
_CALLS: Final = frozenset({"REDUCE", "NEWOBJ", "NEWOBJ_EX", "BUILD"})
_ADDITIONS: Final = frozenset({"APPEND", "APPENDS", "SETITEM", "SETITEMS", "ADDITEMS"})
# A pickler does not write the first four. The others need buffers outside of the pickle, or a registry of classes.
_REFUSED: Final = frozenset({"DUP", "INST", "OBJ", "PERSID", "NEXT_BUFFER", "READONLY_BUFFER", "EXT1", "EXT2", "EXT4"})

# For each operation: number of inputs before a mark, whether a mark and any number of inputs follow, whether it pushes.
_EFFECTS: Final = {
    operation.name: (
        [*operation.stack_before, pickletools.markobject].index(pickletools.markobject),
        pickletools.markobject in operation.stack_before,
        bool(operation.stack_after),
    )
    for operation in pickletools.opcodes
}
_ERRORS: Final = (
    *(pickle.UnpicklingError, EOFError, ValueError, TypeError, LookupError, AttributeError, ArithmeticError),
    *(RuntimeError, MemoryError),
)


@dataclasses.dataclass(slots=True, eq=False)
class _Value:
    """Cost of a value that may be used often."""

    depth: int = 0  # depth of the nested tuples
    size: int = 0  # number of the nested tuples; shared ones count each time
    length: int = 0  # number of characters or items, which a call with this value may copy


_FLAT: Final = _Value()  # stands for a value of no length
_CLASS: Final = _Value()  # stands for a class or function
_CHEAP_CLASS: Final = _Value()


def objects_max(file_bytes: int, object_bytes: int = _OBJECT_BYTES) -> int:
    """Return the number of tensors and objects that a file of this size may describe."""
    return _OBJECTS_MAX + file_bytes // object_bytes


def load_pickle(
    file: io.BytesIO,
    file_bytes: int,
    find_class: Callable[[str, str], Any],
    persistent_load: Callable[[Any], object] | None = None,
    object_bytes: int = _OBJECT_BYTES,
) -> object:
    """Load the next pickle of ``file``, in any protocol, unless that costs more than a file of this size justifies.

    Args:
        file: the bytes. The position moves to the end of the pickle.
        file_bytes: size of the file from which they were read [B].
        find_class: returns the class or function that replaces a name, which consists of a module and a name in it.
        persistent_load: returns the object with a persistent id.
        object_bytes: bytes of the file for each object that it may describe.

    Raises:
        TruncatedError: the pickle is damaged.
        StructureError: the pickle costs too much, or contradicts itself.
    """
    start = file.tell()
    try:
        _Scan(file_bytes, object_bytes).run(file)
    except (LookupError, ValueError) as error:
        raise TruncatedError(f"its pickle is damaged or truncated at byte {file.tell():,}") from error
    file.seek(start)
    try:
        return _Unpickler(file, find_class, persistent_load).load()
    except _ERRORS as error:
        raise StructureError(f"its pickle contradicts itself ({type(error).__name__}: {error})") from error


class _Unpickler(pickle.Unpickler):
    def __init__(
        self,
        file: io.BytesIO,
        find_class: Callable[[str, str], Any],
        persistent_load: Callable[[Any], object] | None,
    ) -> None:
        super().__init__(file, encoding="utf-8")
        self._find_class, self._persistent_load = find_class, persistent_load

    def find_class(self, module: str, name: str) -> Any:  # noqa: ANN401 - signature of the base class
        # Protocol 2 uses the names of Python 2.
        module, name = NAME_MAPPING.get((module, name), (IMPORT_MAPPING.get(module, module), name))
        return self._find_class(module, name)

    def persistent_load(self, pid: Any) -> object:  # noqa: ANN401 - signature of the base class
        if self._persistent_load is None:
            raise StructureError("its pickle refers to objects outside of the pickle")
        return self._persistent_load(pid)


class _Scan:
    """Interpreter that replaces each value by its cost."""

    def __init__(self, file_bytes: int, object_bytes: int) -> None:
        self._number_max = self._values_left = _VALUES_MAX + file_bytes
        self._copies_left = _VALUES_MAX + _COPIES_PER_BYTE * file_bytes
        self._objects_left = objects_max(file_bytes, object_bytes)
        self._names_left = _NAMES_MAX
        self._stack: list[_Value] = []
        self._outer: list[list[_Value]] = []
        self._memo: dict[int, _Value] = {}

    def run(self, file: io.BytesIO) -> None:
        """Scan to the end of the pickle."""
        for operation, argument, _ in pickletools.genops(file):
            if operation.name in _REFUSED:
                raise StructureError(f"its pickle has the operation {operation.name}, which is not supported")
            self._apply(operation, argument)
            self._values_left -= 1
            if self._values_left < 0:
                raise StructureError(f"its pickle describes more than {_VALUES_MAX:,} values")
            if self._copies_left < 0:
                raise StructureError(f"its calls copy more than {_VALUES_MAX:,} characters or items")
            if self._objects_left < 0:
                problem = f"it describes more than {_OBJECTS_MAX:,} tensors or objects, and most of them are tiny"
                raise StructureError(problem)
            if self._stack and self._stack[-1].depth > _DEPTH_MAX:
                raise StructureError(f"its tuples are nested deeper than {_DEPTH_MAX:,}")
            if self._names_left < 0:
                raise StructureError(f"it names classes more than {_NAMES_MAX:,} times")

    def _apply(self, operation: pickletools.OpcodeInfo, argument: Any) -> None:  # noqa: ANN401 - of any operation
        name = operation.name
        if name == "MARK":
            self._outer.append(self._stack)
            self._stack = []
        elif name in _PUTS:
            self._put(len(self._memo) if name == "MEMOIZE" else argument)
        elif name in _GETS:
            self._stack.append(self._memo[argument])
        else:
            fixed, has_slice, has_result = _EFFECTS[name]
            inputs = self._pop(fixed, has_slice=has_slice) if fixed or has_slice else ()
            if has_result:
                self._stack.append(self._result(name, argument, inputs))

    def _pop(self, fixed: int, *, has_slice: bool) -> Sequence[_Value]:
        """Remove and return the inputs of an operation: a fixed number, and below a mark any number."""
        above: list[_Value] = []
        if has_slice:
            above, self._stack = self._stack, self._outer.pop()
        below = [self._stack.pop() for _ in range(fixed)]
        return [*reversed(below), *above]

    def _result(self, name: str, argument: Any, inputs: Sequence[_Value]) -> _Value:  # noqa: ANN401 - of any operation
        if name in _TUPLES or name in _CALLS or name == "BINPERSID":
            return self._combined(name, inputs)
        if name in _ADDITIONS:
            if inputs[0] in (_FLAT, _CLASS, _CHEAP_CLASS):
                raise StructureError("its pickle adds items to a value that is no container")
            # The same object, because the container may have been remembered while it was empty.
            inputs[0].length += len(inputs) - 1
            return inputs[0]
        if name in ("GLOBAL", "STACK_GLOBAL"):
            self._names_left -= 1
            return _CHEAP_CLASS if argument is not None and argument.startswith(_CHEAP) else _CLASS
        if isinstance(argument, (str, bytes, bytearray)):
            return _Value(length=len(argument))
        return _Value(length=len(inputs)) if name in _CONTAINERS else _FLAT

    def _combined(self, name: str, inputs: Sequence[_Value]) -> _Value:
        """Return a tuple of values, or the result of a call with them."""
        depth = max((value.depth for value in inputs), default=0)
        size = sum(value.size for value in inputs)
        length = sum(value.length for value in inputs)
        if name in _TUPLES:
            # Shared tuples count each time, because Python visits them each time that it hashes the new tuple.
            self._values_left -= size + 1
            return _Value(depth + 1, size + 1, length + len(inputs))
        # Each call may copy the items of its arguments.
        self._copies_left -= length
        if name == "BINPERSID":
            return _FLAT
        if name == "BUILD" and inputs[0] in (_CLASS, _CHEAP_CLASS):
            # The whole process uses the class or function.
            raise StructureError("its pickle changes attributes of a class or function")
        self._objects_left -= inputs[0] is not _CHEAP_CLASS
        return inputs[0] if name == "BUILD" else _Value(depth, size, length)

    def _put(self, number: int) -> None:
        self._memo[number] = self._stack[-1]
        if number > self._number_max:
            # Python would reserve memory for all smaller numbers.
            self._values_left = 0
