"""Read folders of DeepSpeed ZeRO 1, 2 and 3, as ``engine.save_checkpoint()`` writes them.

Each rank writes its range of the flat fp32 weights, and the optimizer state of this range. The position of a parameter
follows from the order of shapes that rank 0 wrote, as in DeepSpeed's own ``zero_to_fp32.py``. No code in the files is
executed: stand-ins replace DeepSpeed's classes, and all other classes are refused.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from asymcheck.convert.part import MODEL, overlaps
from asymcheck.convert.source_file import SourceFile
from asymcheck.convert.torch_file import read_torch_file
from asymcheck.errors import ForeignFileError, InvalidInputError
from asymcheck.format.registry import DTYPE_BYTES
from asymcheck.state.leaves import TensorBytes

_SHARDED_STAGE = 3  # in this stage, each rank has a shard of every parameter
_LATEST = "latest"
_TAG_CHARACTERS_MAX = 255  # no folder has a longer name
_OPTIMIZER_FILES = "*_optim_states.pt"
_RANK = re.compile(r"(?:bf16_)?zero_pp_rank_(\d+)_mp_rank_00_optim_states\.pt")
_FOLDER_COUNTERS = ("global_steps", "global_samples", "skipped_steps", "lr_scheduler")
_OWN_KEYS = frozenset(
    {
        *_FOLDER_COUNTERS,
        *("module", "buffer_names", "optimizer", "param_shapes", "frozen_param_shapes", "frozen_param_fragments"),
        *("shared_params", "data_sampler", "random_ltd", "dp_world_size", "mp_world_size"),
        *("checkpoint_parallel_dimensions", "ds_config", "ds_version", "universal_checkpoint_info"),
        *("sparse_tensor_module_names", "csr_tensor_module_names"),
    }
)
"""Keys that DeepSpeed writes. All others are those of the user's ``client_state``."""
_CLIENT_STATE = "client_state"
_SAVE_AGAIN = "save the checkpoint again with engine.save_checkpoint()"
_LOAD = "load the folder with engine.load_checkpoint(), and save the engine with a Checkpointer"


_STAND_INS: Mapping[str, type] = {
    "deepspeed.runtime.zero.config.ZeroStageEnum": int,
    # Plain objects with the pickled attributes, which are not read.
    "deepspeed.runtime.fp16.loss_scaler.LossScaler": SimpleNamespace,
    "deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler": SimpleNamespace,
    "deepspeed.utils.tensor_fragment.fragment_address": SimpleNamespace,
}


def is_deepspeed_folder(path: Path) -> bool:
    """Tell whether a folder is a DeepSpeed checkpoint, or the parent folder of one."""
    return _checkpoint_folder(path) is not None


def _checkpoint_folder(path: Path) -> Path | None:
    """Return the folder itself, or its sub-folder with the latest checkpoint."""
    if any(path.glob(_OPTIMIZER_FILES)):
        return path
    latest = path / _LATEST
    if not latest.is_file():
        return None
    with latest.open(errors="replace") as file:
        tag = file.read(_TAG_CHARACTERS_MAX).strip()
    folder = path / tag
    return folder if tag and Path(tag).name == tag and any(folder.glob(_OPTIMIZER_FILES)) else None


def read_deepspeed_folder(path: Path, opened: Callable[[Path], SourceFile], parts: Sequence[str] = ()) -> object:
    """Return the state in a DeepSpeed folder; ``opened`` opens its files.

    With ``parts``, dotted names, the ``client_state`` is read only if one of them is in it.

    The state has three keys. ``model`` has the fp32 weights and the other tensors of the module. ``optimizer`` has the
    optimizer state of each weight and the options of the parameter groups. ``counters`` has the progress of training.
    If the checkpoint was saved with a ``client_state``, the fourth key has the one of rank 0.

    Raises:
        ForeignFileError: files are missing, damaged, or hold values that cannot be stored.
        InvalidInputError: the path is not a folder of DeepSpeed.
    """
    folder = _checkpoint_folder(path)
    if folder is None:
        raise InvalidInputError(f"{path} is not a DeepSpeed checkpoint; check the path")
    try:
        return _Folder(folder, opened, parts).state()
    except (KeyError, TypeError, AttributeError, IndexError, ValueError) as error:
        problem = f"not written by engine.save_checkpoint() ({type(error).__name__}: {error})"
        raise ForeignFileError(folder, problem, _LOAD) from error


@dataclasses.dataclass(frozen=True)
class _Range:
    """Elements of a parameter that one rank has in the flat tensor of a group."""

    rank: int
    group: int
    first: int
    count: int


class _Folder:
    def __init__(self, folder: Path, opened: Callable[[Path], SourceFile], parts: Sequence[str]) -> None:
        self._folder = folder
        self._ranks = [self._read(opened(file)) for file in self._files()]
        states = [saved["optimizer_state_dict"] for saved in self._ranks]
        # The stage 1 optimizer with fp32 gradients does not write its stage.
        self._stage = int(states[0].get("zero_stage", 1))
        is_sharded = self._stage == _SHARDED_STAGE
        self._flats: list[list[TensorBytes]] = [
            state["fp32_flat_groups" if is_sharded else "single_partition_of_fp32_groups"] for state in states
        ]
        bases = [state["optimizer_state_dict" if is_sharded else "base_optimizer_state"] for state in states]
        if not all(isinstance(base, dict) for base in bases):
            raise ForeignFileError(folder, "elastic checkpoints are not supported", _LOAD)
        self._moments: list[Mapping[int, Mapping[str, object]]] = [base["state"] for base in bases]
        self._groups: list[Mapping[str, Any]] = bases[0]["param_groups"]
        self._paddings: list[list[int]] | None = states[0].get("param_alignment_paddings")
        count = states[0]["partition_count"]
        world_size = max(count) if isinstance(count, (list, tuple)) else count
        if world_size != len(self._ranks):
            raise ForeignFileError(folder, f"files of {len(self._ranks)} of {world_size} ranks found", _SAVE_AGAIN)
        prefix = "zero_pp_rank_{}_" if is_sharded else ""
        ranks = range(world_size if is_sharded else 1)
        files = [opened(folder / f"{prefix}mp_rank_00_model_states.pt".format(rank)) for rank in ranks]
        self._models: list[Any] = [self._read(file, keys=_OWN_KEYS.__contains__) for file in files]
        self._client_state: Any = {}
        if not parts or overlaps(_CLIENT_STATE, parts):
            self._client_state = self._read(files[0], name=_CLIENT_STATE, keys=lambda key: key not in _OWN_KEYS)

    @staticmethod
    def _read(file: SourceFile, **more: Any) -> Any:  # noqa: ANN401 - any content of the file
        return read_torch_file(file, stand_ins=_STAND_INS, **more)

    def _files(self) -> list[Path]:
        by_rank = {}
        for file in self._folder.glob(_OPTIMIZER_FILES):
            match = _RANK.fullmatch(file.name)
            if match is None:
                problem = f"{file.name}: expert and tensor parallelism are not supported"
                raise ForeignFileError(self._folder, problem, _LOAD)
            by_rank[int(match[1])] = file
        if sorted(by_rank) != list(range(len(by_rank))):
            raise ForeignFileError(self._folder, f"only files of ranks {sorted(by_rank)} found", _SAVE_AGAIN)
        return [by_rank[rank] for rank in sorted(by_rank)]

    def state(self) -> object:
        first = self._models[0]
        model: dict[str, object] = {}
        optimizer: dict[str, object] = {}
        for name, shape, ranges in self._trained():
            model[name] = self._whole(name, shape, [(self._flats[part.rank][part.group], part) for part in ranges])
            optimizer[name] = self._state_of(name, shape, ranges)
        if self._stage == _SHARDED_STAGE:
            model |= self._frozen()
            model |= {name: first["module"][name] for name in first["buffer_names"]}
        else:
            # The low-precision copies of the weights are left out.
            model |= {name: value for name, value in first["module"].items() if name not in model}
        model |= {name: model[other] for name, other in first["shared_params"].items() if other in model}
        state = {
            MODEL: model,
            "optimizer": {"state": optimizer, "param_groups": [self._options(group) for group in self._groups]},
            "counters": {name: first[name] for name in _FOLDER_COUNTERS if name in first},
        }
        return {**state, _CLIENT_STATE: self._client_state} if self._client_state else state

    def _trained(self) -> Iterator[tuple[str, tuple[int, ...], list[_Range]]]:
        """Yield name, shape and ranges of all trained parameters."""
        shapes = self._models[0]["param_shapes"]
        if self._stage == _SHARDED_STAGE:
            # All ranks have equal shards of each parameter. Subgroups do not share parameters.
            lengths = [flat.shape[0] for flat in self._flats[0]]
            group = first = 0
            for name, shape in itertools.chain.from_iterable(named.items() for named in shapes):
                size = -(-math.prod(shape) // len(self._ranks))
                while group < len(lengths) - 1 and first + size > lengths[group]:
                    group, first = group + 1, 0
                yield name, tuple(shape), [_Range(rank, group, first, size) for rank in range(len(self._ranks))]
                first += size
            return
        for group, named in enumerate(shapes):
            paddings = self._paddings[group] if self._paddings is not None else [0] * len(named)
            offset = 0
            for (name, shape), padding in zip(named.items(), paddings, strict=True):
                length = math.prod(shape)
                yield name, tuple(shape), list(self._cut(group, offset, length))
                offset += length + padding

    def _cut(self, group: int, offset: int, length: int) -> Iterator[_Range]:
        """Split a range of a group's flat tensor by rank. The ranks have consecutive pieces of the flat tensor."""
        for rank, flats in enumerate(self._flats):
            size = flats[group].shape[0]
            count = min(size - offset, length)
            if count > 0:
                yield _Range(rank, group, offset, count)
                length -= count
            offset = max(0, offset - size)

    def _state_of(self, name: str, shape: tuple[int, ...], ranges: Sequence[_Range]) -> dict[str, object]:
        """Return the elementwise optimizer state of a parameter."""
        state: dict[str, object] = {}
        for key, value in self._moments[ranges[0].rank].get(ranges[0].group, {}).items() if ranges else ():
            if isinstance(value, TensorBytes) and value.shape:
                parts: list[tuple[Any, _Range]] = [(self._moments[part.rank][part.group][key], part) for part in ranges]
                state[key] = self._whole(f"{name}.{key}", shape, parts)
        return state

    def _options(self, group: Mapping[str, Any]) -> dict[str, object]:
        state = self._moments[0].get(group["params"][0], {}) if group["params"] else {}
        scalars = {key: value for key, value in state.items() if not isinstance(value, TensorBytes) or not value.shape}
        return {**{key: value for key, value in group.items() if key != "params"}, **scalars}

    def _frozen(self) -> dict[str, object]:
        """Return the frozen parameters of stage 3, of which each rank has a shard."""
        frozen: dict[str, object] = {}
        for name, shape in (self._models[0].get("frozen_param_shapes") or {}).items():
            shards = [model["frozen_param_fragments"][name] for model in self._models]
            parts = [(shard, _Range(rank, 0, 0, shard.shape[0])) for rank, shard in enumerate(shards)]
            frozen[name] = self._whole(name, tuple(shape), parts)
        return frozen

    def _whole(self, name: str, shape: tuple[int, ...], parts: Sequence[tuple[TensorBytes, _Range]]) -> TensorBytes:
        """Join the parts of a tensor. The last part may have padding."""
        present = sum(min(part.count, max(0, flat.shape[0] - part.first)) for flat, part in parts)
        if present < math.prod(shape) or len({flat.dtype for flat, _ in parts}) > 1:
            problem = f"{present} of the {math.prod(shape)} elements of {name} found"
            raise ForeignFileError(self._folder, problem, _SAVE_AGAIN)
        dtype = parts[0][0].dtype if parts else "float32"
        return _Chain(dtype, shape, [(flat, part.first, part.count) for flat, part in parts])


class _Chain(TensorBytes):
    """A tensor that is the concatenation of ranges of other tensors."""

    def __init__(self, dtype: str, shape: tuple[int, ...], parts: Sequence[tuple[TensorBytes, int, int]]) -> None:
        super().__init__(dtype, shape)
        self._parts = parts

    def read(self, start: int, target: memoryview) -> None:
        """Fill ``target`` from the overlapping ranges."""
        width, done = DTYPE_BYTES[self.dtype], 0
        for part, first, count in self._parts:
            size = min(count * width - start, len(target) - done)
            if size > 0:
                part.read(first * width + start, target[done : done + size])
                done += size
            start = max(0, start - count * width)
