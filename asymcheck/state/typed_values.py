"""Typed values of a state: convert values of the standard library, torch and numpy to their parts and back."""

from __future__ import annotations

import builtins
import copy
import dataclasses
import datetime as dt
import enum
import random
import warnings
from collections import defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path, PosixPath, PurePath, PurePosixPath, PureWindowsPath, WindowsPath
from typing import Any, cast

import numpy as np
import torch

from asymcheck.errors import RefusedStateError
from asymcheck.format.typed_value import BIT_GENERATORS, FACTORIES, MAXLEN_MAX, SETS
from asymcheck.state.rng import MT19937_WORDS, set_torch_state

_PHILOX_WORDS = 4
_PATHS: dict[type, tuple[str, str]] = {
    PosixPath: ("path", "posix"),
    WindowsPath: ("path", "windows"),
    PurePosixPath: ("pure-path", "posix"),
    PureWindowsPath: ("pure-path", "windows"),
}
_GENERATORS = {"cpu": "torch-generator", "cuda": "device-generator"}
"""Types of generators of torch by the type of their device."""
_STATE_OF = {"torch-generator": "a new generator", "device-generator": "its state as a tensor"}
CLASSES = ("dataclass", "enum", "namedtuple")
"""Types of typed values that have a class of the program, which no store imports."""
IMMUTABLE = (PurePath, dt.date, dt.time, dt.timedelta, range, slice, frozenset)
"""Types of immutable typed values: a stored value replaces the given one."""


@dataclasses.dataclass(frozen=True)
class TypedValue:
    """Parts of a typed value (SPEC.md §A9)."""

    kind: str
    parameter: str | int | None
    content: Any  # depends on the kind, for example a list of items or a dict of fields
    like: object = None
    """Given value that supplies the class, or the object to restore in place; None for neither."""


def typed_value(value: object) -> TypedValue | None:
    """Return the parts of a value; None if it is no typed value, or not one that can be stored."""
    kind = type(value)
    if isinstance(value, torch.Tensor):
        return _nested_tensor(value) if value.is_nested else None
    if isinstance(value, enum.Enum):
        return TypedValue("enum", f"{kind.__name__}.{_name_of(value)}", value.value)
    if isinstance(value, tuple):
        fields = getattr(kind, "_fields", None)
        return TypedValue("namedtuple", kind.__name__, dict(zip(fields, value, strict=True))) if fields else None
    if dataclasses.is_dataclass(value) and not isinstance(value, (type, Mapping, Sequence)):
        names = [field.name for field in dataclasses.fields(value)]
        if not all(hasattr(value, name) for name in names):
            return None  # a field with init=False was never set
        return TypedValue("dataclass", kind.__name__, {name: getattr(value, name) for name in names})
    parts = _PARTS.get(kind)
    return None if parts is None else parts(value)


def _defaultdict(value: defaultdict[object, object]) -> TypedValue | None:
    factory = value.default_factory
    name = getattr(factory, "__name__", "")
    if factory is not None and (name not in FACTORIES or factory is not getattr(builtins, name)):
        return None
    return TypedValue("defaultdict", name if factory is not None else None, dict(value))


def _datetime(value: dt.time | dt.datetime) -> TypedValue | None:
    zone = value.tzinfo
    # A zone with a name of its own, such as CET, differs from the zone that the offset alone gives.
    if zone is not None and (type(zone) is not dt.timezone or repr(zone) != repr(dt.timezone(zone.utcoffset(None)))):
        return None
    return TypedValue(type(value).__name__, value.fold or None, value.isoformat())


def _torch_generator(value: torch.Generator) -> TypedValue | None:
    kind = _GENERATORS.get(value.device.type)
    # The state of a generator of a CUDA device is in host memory, too, and the number of the device is no part of it.
    return None if kind is None else TypedValue(kind, value.device.type, value.get_state())


def is_nested(value: object) -> bool:
    """Tell whether a value is a nested tensor, which is stored as several tensors."""
    return isinstance(value, torch.Tensor) and value.is_nested


def _nested_tensor(value: torch.Tensor) -> TypedValue | None:
    nested: Any = value.detach()
    if nested.layout == torch.strided:
        components = list(nested.unbind())
        return TypedValue("nested-tensor", "strided", components) if components else None
    if not isinstance(nested.shape[1], torch.SymInt):
        return None
    parts = [nested.values(), nested.offsets(), nested.lengths()]
    return TypedValue("nested-tensor", "jagged", [part for part in parts if part is not None])


def _numpy_generator(value: np.random.Generator) -> TypedValue | None:
    name = type(value.bit_generator).__name__
    is_known = name in BIT_GENERATORS and type(value.bit_generator) is getattr(np.random, name)
    return TypedValue("numpy-generator", name, value.bit_generator.state) if is_known else None


def _python_random(value: random.Random) -> TypedValue:
    version, words, gauss = value.getstate()
    return TypedValue("python-random", None, (version, np.array(words, dtype=np.uint32), gauss))


_PARTS: dict[type, Callable[[Any], TypedValue | None]] = {
    defaultdict: _defaultdict,
    deque: lambda value: TypedValue("deque", value.maxlen, list(value)) if (value.maxlen or 0) <= MAXLEN_MAX else None,
    set: lambda value: TypedValue("set", None, tuple(value)),
    frozenset: lambda value: TypedValue("frozenset", None, tuple(value)),
    dt.date: lambda value: TypedValue("date", None, value.isoformat()),
    dt.time: _datetime,
    dt.datetime: _datetime,
    dt.timedelta: lambda value: TypedValue("timedelta", None, (value.days, value.seconds, value.microseconds)),
    range: lambda value: TypedValue("range", None, (int(value.start), int(value.stop), int(value.step))),
    slice: lambda value: TypedValue("slice", None, (value.start, value.stop, value.step)),
    torch.Generator: _torch_generator,
    np.random.Generator: _numpy_generator,
    random.Random: _python_random,
    **{kind: lambda value: TypedValue(*_PATHS[type(value)], str(value)) for kind in _PATHS},
}


def misfit(given: object, parts: TypedValue, stored: TypedValue) -> str:
    """Return the reason why a given value with these parts cannot be restored from a stored one; empty if it can."""
    if {stored.kind, parts.kind} == {*_GENERATORS.values()}:
        device = stored.parameter
        advice = f'give torch.Generator(device="{device}"), or None to get {_STATE_OF[stored.kind]}'
        return f"a generator of {parts.parameter} is given, but one of {device} is stored; {advice}"
    if stored.kind != parts.kind:
        return f"a {parts.kind} is given, but a {stored.kind} is stored"
    content = stored.content
    if isinstance(given, enum.Enum):
        if _member(type(given), stored) is None:
            return f"{type(given).__name__} has no member for the stored {stored.parameter}"
    elif parts.kind in ("dataclass", "namedtuple"):
        extra = [str(key) for key in content if key not in parts.content]
        if extra:
            return f"{type(given).__name__} lacks the stored field{'s' if len(extra) > 1 else ''} {', '.join(extra)}"
    elif parts.kind == "deque":
        if isinstance(parts.parameter, int) and len(content) > parts.parameter:
            return f"a deque of at most {parts.parameter} items is given, but {len(content)} are stored"
    elif parts.parameter != stored.parameter and parts.kind == "nested-tensor":
        return f"a nested tensor of layout {parts.parameter} is given, but one of layout {stored.parameter} is stored"
    elif parts.parameter != stored.parameter and parts.kind == "numpy-generator":
        return f"a generator of {parts.parameter} is given, but one of {stored.parameter} is stored"
    return ""


def build(parts: TypedValue) -> object:
    """Return the value of its parts: the object ``like`` with the stored content, if it is given.

    Without ``like``, a namedtuple or dataclass becomes a dict, and an Enum member its value, because no class is
    imported by its name. A generator of a CUDA device becomes its state.

    Raises:
        RefusedStateError: the class, or a random number generator, refused the content.
    """
    try:
        return _BUILDERS[parts.kind](parts)
    except (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
        raise RefusedStateError(f"a {parts.kind} refused the stored content: {error!r}", (), None) from error


def instances_in(*states: object) -> dict[str, object]:
    """Return an instance of each class of Enum, namedtuple and dataclass in the containers of states, by its name.

    A name that several classes have is left out.
    """
    found: dict[str, dict[type, object]] = {}
    seen: set[int] = set()
    values = [*states]
    while values:
        value = values.pop()
        kind = type(value)
        if isinstance(value, enum.Enum):
            found.setdefault(kind.__name__, {})[kind] = value
        elif id(value) not in seen:
            seen.add(id(value))
            is_dataclass = dataclasses.is_dataclass(value) and not isinstance(value, type)
            if is_dataclass or (isinstance(value, tuple) and hasattr(kind, "_fields")):
                found.setdefault(kind.__name__, {})[kind] = value
            if isinstance(value, Mapping):
                values += value.values()
            elif isinstance(value, (list, tuple, deque, set, frozenset)):
                values += value
            elif is_dataclass:
                values += [getattr(value, field.name, None) for field in dataclasses.fields(value)]  # type: ignore[arg-type]  # a dataclass
    return {name: next(iter(kinds.values())) for name, kinds in found.items() if len(kinds) == 1}


def with_class(shape: object, instances: Mapping[str, object]) -> object:
    """Return a typed value, or an item of a set, with its classes of Enum, namedtuple and dataclass, if given."""
    if type(shape) is tuple:
        return tuple(with_class(item, instances) for item in shape)
    if not isinstance(shape, TypedValue):
        return shape
    if shape.kind in SETS:
        return dataclasses.replace(shape, content=with_class(shape.content, instances))
    given = instances.get(str(shape.parameter).partition(".")[0]) if shape.kind in CLASSES else None
    parts = typed_value(given)
    if parts is None or misfit(given, parts, shape):
        return shape
    fits = shape.kind == "enum" or parts.content.keys() == shape.content.keys()
    return dataclasses.replace(shape, like=copy.copy(given)) if fits else shape


def without_class(shape: object) -> list[str]:
    """Return the names of the Enum members in a set whose class is not known."""
    if type(shape) is tuple:
        return [name for item in shape for name in without_class(item)]
    if not isinstance(shape, TypedValue):
        return []
    if shape.kind == "enum":
        return [] if isinstance(shape.like, enum.Enum) else [str(shape.parameter)]
    return without_class(shape.content)


def _name_of(member: enum.Enum) -> str:
    # Before Python 3.11, a combination of flags has no name.
    return member.name or "|".join(
        flag.name for flag in type(member) if flag.value & member.value and not flag.value & (flag.value - 1)
    )


def _member(kind: type[enum.Enum], stored: TypedValue) -> enum.Enum | None:
    member = kind.__members__.get(str(stored.parameter).rpartition(".")[2])
    if member is None:
        # Combined flags are no members by name.
        try:
            member = kind(stored.content)
        except (TypeError, ValueError):
            return None
    return member


def _build_namedtuple(parts: TypedValue) -> object:
    if parts.like is None:
        return parts.content
    kind: Any = type(parts.like)
    return kind._make([parts.content[name] for name in kind._fields])  # noqa: SLF001 - public


def _build_dataclass(parts: TypedValue) -> object:
    target, content = parts.like, parts.content
    if target is None:
        return content
    # Other code may rely on a frozen object, so a copy takes its place.
    is_frozen = type(target).__dataclass_params__.frozen  # type: ignore[attr-defined]  # a dataclass
    target = copy.copy(target) if is_frozen else target
    for name, value in content.items():
        (object.__setattr__ if is_frozen else setattr)(target, name, value)
    return target


def _build_set(parts: TypedValue) -> object:
    target: set[object] = parts.like if isinstance(parts.like, set) else set()
    target.clear()
    target.update(parts.content)
    return target


def _build_deque(parts: TypedValue) -> object:
    new: deque[object] = deque(maxlen=cast("int | None", parts.parameter))
    target = parts.like if isinstance(parts.like, deque) else new
    target.clear()
    target.extend(parts.content)
    return target


def _build_path(parts: TypedValue) -> object:
    is_own = (parts.parameter == "windows") == isinstance(Path(), WindowsPath)
    if parts.kind == "path" and is_own:
        return Path(parts.content)
    # The path of another operating system cannot be opened here.
    return PureWindowsPath(parts.content) if parts.parameter == "windows" else PurePosixPath(parts.content)


def _build_torch_generator(parts: TypedValue) -> object:
    if not isinstance(parts.like, torch.Generator) and parts.kind == "device-generator":
        # This machine may lack the device, so only a given generator takes the state.
        return parts.content
    generator = parts.like if isinstance(parts.like, torch.Generator) else torch.Generator()
    set_torch_state(generator, parts.content)
    return generator


def _build_nested(parts: TypedValue) -> object:
    given, content = parts.like, parts.content
    if isinstance(given, torch.Tensor):
        own = cast("TypedValue", typed_value(given)).content
        content = [part.to(given.device) for part in content]
        # The first tensor of the jagged layout has the elements, and the others say where each component is.
        filled = 1 if parts.parameter == "jagged" else len(own)
        pairs = [*zip(own, content, strict=False)]
        fits = len(own) == len(content) and all((a.shape, a.dtype) == (b.shape, b.dtype) for a, b in pairs)
        if fits and all(torch.equal(a, b) for a, b in pairs[filled:]):
            for a, b in pairs[:filled]:
                a.copy_(b)
            return given
        if isinstance(given, torch.nn.Parameter):
            raise RefusedStateError("the components of the given nested parameter have other shapes", (), None)
    if parts.parameter == "jagged":
        _check_offsets(*content)
        return torch.nested.nested_tensor_from_jagged(content[0], *content[1:])
    with warnings.catch_warnings():
        # torch calls the layout a prototype.
        warnings.simplefilter("ignore", UserWarning)
        return torch.nested.nested_tensor(content)


def _check_offsets(values: torch.Tensor, offsets: torch.Tensor, lengths: torch.Tensor | None = None) -> None:
    """Refuse components outside of the values, which torch would read from foreign memory."""
    known = offsets.dtype in (torch.int32, torch.int64) and offsets.dim() == 1 and len(offsets) > 1 and values.dim() > 0
    sizes = offsets.diff() if known and lengths is None else lengths
    if not known or sizes is None or sizes.shape != (len(offsets) - 1,) or sizes.dtype != offsets.dtype:
        raise RefusedStateError("the offsets or lengths of a nested-tensor are malformed", (), None)
    ends = offsets[:-1] + sizes
    if offsets.min() < 0 or sizes.min() < 0 or sizes.max() > len(values) or ends.max() > len(values):
        raise RefusedStateError("a component of a nested-tensor is outside of its values", (), None)


def _build_numpy_generator(parts: TypedValue) -> object:
    content = parts.content
    # numpy does not check these positions, with which it reads from memory.
    positions = [
        (content.get("state", {}).get("pos", 0), MT19937_WORDS),
        (content.get("buffer_pos", 0), _PHILOX_WORDS),
    ]
    if any(type(position) is not int or not 0 <= position <= end for position, end in positions):
        raise RefusedStateError("a position of a numpy-generator is outside its buffer", (), None)
    generator = parts.like
    if not isinstance(generator, np.random.Generator):
        generator = np.random.Generator(getattr(np.random, str(parts.parameter))())
    generator.bit_generator.state = content
    return generator


def _build_python_random(parts: TypedValue) -> object:
    version, words, gauss = parts.content
    if len(words) != MT19937_WORDS + 1:
        raise RefusedStateError(f"a python-random has {MT19937_WORDS + 1} words, not {len(words)}", (), None)
    generator = parts.like if isinstance(parts.like, random.Random) else random.Random()  # noqa: S311 - no secret
    generator.setstate((version, tuple(map(int, words)), gauss))
    return generator


_BUILDERS: dict[str, Callable[[TypedValue], object]] = {
    "defaultdict": lambda parts: defaultdict(
        getattr(builtins, str(parts.parameter)) if parts.parameter else None, parts.content
    ),
    "deque": _build_deque,
    "set": _build_set,
    "frozenset": lambda parts: frozenset(parts.content),
    "namedtuple": _build_namedtuple,
    "dataclass": _build_dataclass,
    "enum": lambda parts: _member(type(parts.like), parts) if isinstance(parts.like, enum.Enum) else parts.content,
    "path": _build_path,
    "pure-path": _build_path,
    "date": lambda parts: dt.date.fromisoformat(parts.content),
    "time": lambda parts: dt.time.fromisoformat(parts.content).replace(fold=int(parts.parameter or 0)),
    "datetime": lambda parts: dt.datetime.fromisoformat(parts.content).replace(fold=int(parts.parameter or 0)),
    "timedelta": lambda parts: dt.timedelta(*parts.content),
    "range": lambda parts: range(*parts.content),
    "slice": lambda parts: slice(*parts.content),
    "torch-generator": _build_torch_generator,
    "device-generator": _build_torch_generator,
    "nested-tensor": _build_nested,
    "numpy-generator": _build_numpy_generator,
    "python-random": _build_python_random,
}

_OBJECT = "give it state_dict() and load_state_dict(), or use tensors, numbers, strings, lists and dicts"
_REMEDIES: tuple[tuple[type | tuple[type, ...], str], ...] = (
    (defaultdict, "its default_factory is no builtin type such as int or list; store dict(value)"),
    (deque, "its maxlen is too large; use maxlen=None"),
    ((dt.datetime, dt.time), "use a plain datetime, with a fixed offset from UTC or no tzinfo"),
    (torch.Generator, "only generators of the CPU and of CUDA devices can be stored; store its get_state()"),
    (np.random.Generator, "its bit generator is not one of numpy; store the bit generator's state"),
    (np.random.RandomState, "store its get_state(), or use numpy.random.default_rng()"),
    (np.random.BitGenerator, "store its state, or a numpy.random.Generator of it"),
    (random.Random, "only random.Random itself has a state that can be stored"),
    ((bytearray, memoryview), "store bytes(value)"),
    (Mapping, "store dict(value)"),
    (tuple, "store tuple(value), or use typing.NamedTuple"),
    (type, "store its name as a string"),
    (
        torch.utils.data.DataLoader,
        "use StatefulDataLoader of torchdata, or store the epoch and the number of batches as plain values",
    ),
    ((int, float, str, bytes), "convert it to the plain int, float, str or bytes"),
)


def remedy_for(value: object) -> str:
    """Return advice for a value that cannot be stored."""
    if is_nested(value):
        return "use a nested tensor with components, whose second dimension is the ragged one, or store its unbind()"
    if type(value).__name__ in ("Decimal", "Fraction", "UUID"):
        return "store str(value)"
    if callable(value) and not isinstance(value, type):
        return "leave the function out of the state; pass it again when you build the objects"
    if type(value).__module__ in ("_thread", "threading"):
        return "leave it out of the state"
    return next((remedy for kind, remedy in _REMEDIES if isinstance(value, kind)), _OBJECT)
