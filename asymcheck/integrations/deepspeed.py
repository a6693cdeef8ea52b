"""State of a DeepSpeed ZeRO 1, 2 or 3 engine on every rank.

ZeRO concatenates the trained parameters of a group in fp32. Each rank has one piece of this flat tensor, with its
optimizer state. A rank therefore has a range of each flattened parameter, which is saved as a one-dimensional
:class:`asymcheck.TensorShard` without padding. Names and shapes in a checkpoint depend neither on the number of ranks
nor on the stage.

This module does not import ``deepspeed``, because the engine provides everything.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist

from asymcheck.config import DEFAULT_RUN
from asymcheck.errors import InvalidInputError, StateMismatchError, UnsupportedValueError
from asymcheck.format.tree import Key
from asymcheck.integrations.trainer_callback import groups_of, set_groups
from asymcheck.state.shards import Distributed, TensorShard
from asymcheck.store import Store

_STAGES = (1, 2, 3)
_SHARDED_STAGE = 3  # in this stage, the low-precision parameters are sharded, too
_COUNTERS = ("global_steps", "global_samples", "micro_steps", "skipped_steps")
_KEYS = frozenset(
    {"weights", "frozen", "shapes", "buffers", "optimizer", "groups"}
    | {"scalars", "lr_scheduler", "loss_scaler", "counters"}
)
_State = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class _Range:
    """Range of a flattened parameter that this rank has, as a contiguous range of a flat tensor."""

    name: str
    shape: torch.Size  # of the whole parameter
    start: int  # first element in the flattened parameter
    flat: torch.Tensor
    first: int  # first element in the flat tensor
    count: int  # number of elements; 0 if this rank has none
    group: int = 0  # index of the optimizer's parameter group

    def shard_of(self, flat: torch.Tensor) -> TensorShard:
        """Return the range as a shard of a tensor with the layout of the flat tensor."""
        whole = (math.prod(self.shape),)
        return TensorShard(flat.detach().view(-1).narrow(0, self.first, self.count), whole, (self.start,))

    def fill(self, flat: torch.Tensor, restored: object) -> None:
        """Copy a restored value, which is a whole tensor or this range, into such a tensor."""
        if isinstance(restored, TensorShard):
            restored = restored.local
        target = self.shard_of(flat)
        if not isinstance(restored, torch.Tensor):
            raise StateMismatchError(f"{self.name}: the checkpoint has {type(restored).__name__} instead of a tensor")
        if restored.numel() != self.count:
            restored = restored.view(-1)[self.start : self.start + self.count]
        if restored.data_ptr() != target.local.data_ptr():
            target.local.copy_(restored)


class EngineState(Distributed):
    """State of a DeepSpeed engine, for :class:`asymcheck.Checkpointer` on each rank.

    Example::

        engine, *_ = deepspeed.initialize(model=model, config=config)
        state = {"engine": EngineState(engine), "rng": asymcheck.RngState()}
        with asymcheck.Checkpointer(store, state, every=50) as ckpt:
            restored = ckpt.restore()
            ...
            engine.step()
            ckpt.step(engine.global_steps)

    The state contains shards of the fp32 weights and of the optimizer state, frozen parameters, buffers, options of
    parameter groups, the learning rate schedule, the loss scale and the counters of the engine.
    """

    def __init__(self, engine: Any) -> None:  # noqa: ANN401 - deepspeed has no types
        """Wrap ``engine``.

        Raises:
            InvalidInputError: ``engine`` is not an engine of ZeRO 1, 2 or 3, or uses an unsupported feature.
        """
        _check(engine)
        self._engine = engine
        self._is_stale = False
        engine.module.register_forward_pre_hook(lambda *_: self.settle())

    def state_dict(self) -> _State:
        """Return the state, with the tensors of the engine themselves.

        Raises:
            InvalidInputError: gradients are being accumulated, which would not be saved.
            UnsupportedValueError: the optimizer has tensor state that is not elementwise.
        """
        engine = self._engine
        if engine.micro_steps % engine.gradient_accumulation_steps():
            raise InvalidInputError(
                f"cannot save accumulated gradients: {engine.micro_steps} micro steps are done, and "
                f"{engine.gradient_accumulation_steps()} make a step; save and restore after a full step"
            )
        trained, frozen = list(_trained_ranges(engine)), list(_frozen_ranges(engine))
        scheduler = engine.lr_scheduler
        return {
            "weights": {part.name: part.shard_of(part.flat) for part in trained},
            "frozen": {part.name: part.shard_of(part.flat) for part in frozen},
            "shapes": {part.name: part.shape for part in (*trained, *frozen)},
            "buffers": dict(_buffers(engine.module)),
            "optimizer": {part.name: self._elementwise(part) for part in trained},
            "groups": groups_of(self.optimizer),
            "scalars": self._scalars(trained),
            "lr_scheduler": None if scheduler is None else scheduler.state_dict(),
            "loss_scaler": _numbers(getattr(engine.optimizer, "loss_scaler", None)),
            "counters": {name: getattr(engine, name) for name in _COUNTERS},
        }

    def _elementwise(self, part: _Range) -> dict[str, TensorShard]:
        return {
            key: part.shard_of(value)
            for key, value in self.optimizer.state.get(part.flat, {}).items()
            if isinstance(value, torch.Tensor) and value.shape == part.flat.shape
        }

    def _scalars(self, trained: list[_Range]) -> list[_State]:
        """Return the optimizer state of each group that is not elementwise, such as the number of steps."""
        scalars: list[_State] = [{} for _ in self.optimizer.param_groups]
        for part in trained:
            for key, value in self.optimizer.state.get(part.flat, {}).items():
                if not isinstance(value, torch.Tensor) or value.ndim == 0:
                    scalars[part.group].setdefault(key, value)
                elif value.shape != part.flat.shape:
                    raise UnsupportedValueError(
                        f"optimizer.{part.name}.{key}",
                        f"shape {list(value.shape)} for {list(part.flat.shape)} parameters; use an optimizer with "
                        "elementwise state",
                    )
        return scalars

    def load_state_dict(self, state_dict: _State) -> None:
        """Restore this rank's part of a state.

        In stages 1 and 2, :meth:`settle` gathers the low-precision parameters from all ranks.

        Raises:
            StateMismatchError: the state belongs to another model or optimizer.
        """
        engine = self._engine
        for part in _trained_ranges(engine):
            part.fill(part.flat, state_dict["weights"][part.name])
            self._fill_optimizer(part, state_dict["optimizer"][part.name], state_dict["scalars"][part.group])
        for part in _frozen_ranges(engine):
            part.fill(part.flat, state_dict["frozen"][part.name])
        for name, buffer in _buffers(engine.module):
            restored = state_dict["buffers"][name]
            if restored is not buffer:
                buffer.copy_(restored)
        set_groups(self.optimizer, state_dict["groups"])
        if engine.lr_scheduler is not None and state_dict["lr_scheduler"] is not None:
            engine.lr_scheduler.load_state_dict(state_dict["lr_scheduler"])
        scaler = getattr(engine.optimizer, "loss_scaler", None)
        for name, value in state_dict["loss_scaler"].items():
            if name in _numbers(scaler):
                setattr(scaler, name, value)
        for name in _COUNTERS:
            setattr(engine, name, state_dict["counters"][name])
        # The number of micro steps per step may depend on the number of ranks.
        engine.micro_steps -= engine.micro_steps % engine.gradient_accumulation_steps()
        self._is_stale = True
        if engine.zero_optimization_stage() == _SHARDED_STAGE or dist.get_world_size() == 1:
            self.settle()

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """The optimizer that ZeRO wraps. Only its steps change the weights and the optimizer state."""
        wrapped: torch.optim.Optimizer = self._engine.optimizer.optimizer
        return wrapped

    def owned(self) -> Iterator[torch.Tensor]:
        """Yield the weights and the elementwise optimizer state."""
        if any(group.get("use_muon") for group in self.optimizer.param_groups):
            # For Muon, ZeRO changes the momentum before the optimizer step.
            return
        for part in _trained_ranges(self._engine):
            yield part.shard_of(part.flat).local
            yield from (shard.local for shard in self._elementwise(part).values())

    def misfits(self, stored: Mapping[Key, Any]) -> Iterator[str]:
        """Yield the mismatches with a stored state of another model or optimizer."""
        if not stored.keys() >= _KEYS:
            missing = ", ".join(sorted(_KEYS - stored.keys()))
            yield f"{missing}: missing in the checkpoint, which has no DeepSpeed engine"
            return
        given = {part.name: part.shape for part in (*_trained_ranges(self._engine), *_frozen_ranges(self._engine))}
        for name in given.keys() | stored["shapes"].keys():
            shapes = given.get(name), stored["shapes"].get(name)
            if shapes[0] != shapes[1]:
                texts = ["nothing" if shape is None else str(list(shape)) for shape in shapes]
                yield f"shapes.{name}: {texts[0]} is given, but {texts[1]} is stored"
        trained = {part.name for part in _trained_ranges(self._engine)}
        for name in sorted(trained ^ stored["weights"].keys()):
            trained_in, frozen_in = ("model", "checkpoint") if name in trained else ("checkpoint", "model")
            yield f"weights.{name}: trained in the {trained_in}, but frozen in the {frozen_in}"
        if len(self.optimizer.param_groups) != len(stored["groups"]):
            counts = len(self.optimizer.param_groups), len(stored["groups"])
            yield f"groups: {counts[0]} groups of parameters are given, but {counts[1]} are stored"

    def missing(self, stored: Mapping[Key, Any]) -> Iterator[tuple[object, TensorShard]]:
        """Yield stored state that the optimizer does not have before its first step."""
        for part in _trained_ranges(self._engine):
            for key, placeholder in stored.get("optimizer", {}).get(part.name, {}).items():
                if key not in self.optimizer.state.get(part.flat, {}):
                    yield placeholder, part.shard_of(part.flat)

    def _fill_optimizer(self, part: _Range, elementwise: Mapping[str, object], scalars: Mapping[str, object]) -> None:
        states = self.optimizer.state
        if not elementwise and not scalars:
            # The checkpoint was taken before the first optimizer step.
            states.pop(part.flat, None)
            self._engine.optimizer._hp_optimizer_states_linked = False  # noqa: SLF001 - ZeRO links them again after a step
            return
        state = states[part.flat]
        for key, value in elementwise.items():
            if key not in state:
                dtype = getattr(value, "dtype", part.flat.dtype)
                state[key] = torch.zeros_like(part.flat, dtype=dtype, requires_grad=False)
            part.fill(state[key], value)
        options = self.optimizer.param_groups[part.group]
        for key, value in scalars.items():
            if isinstance(value, torch.Tensor):
                # Optimizers of torch choose the device in the same way.
                device = part.flat.device if options.get("capturable") or options.get("fused") else value.device
                state[key] = value.to(device, copy=True)
            else:
                state[key] = value

    def settle(self) -> None:
        """Update the low-precision parameters from the fp32 weights after a restore.

        In stages 1 and 2 this is a collective operation. :class:`asymcheck.Checkpointer` calls this method once all
        ranks are restored. After :meth:`asymcheck.Store.load`, the next forward pass calls it.
        """
        if not self._is_stale:
            return
        self._is_stale = False
        optimizer = self._engine.optimizer
        if self._engine.zero_optimization_stage() != _SHARDED_STAGE:
            optimizer.update_lp_params()
            return
        for low, high in zip(
            optimizer.fp16_partitioned_groups_flat, optimizer.fp32_partitioned_groups_flat, strict=True
        ):
            low.data.copy_(high.data)
        if optimizer.persistent_parameters:
            # Release parameters that every rank keeps whole. The next forward pass gathers them again.
            optimizer.persistent_parameters[0].partition(optimizer.persistent_parameters)
        optimizer.invalidate_secondary_tensor()


def read_weights(
    store: Store, *, step: int | None = None, run: str = DEFAULT_RUN, part: str = "engine"
) -> dict[str, torch.Tensor]:
    """Return the trained fp32 weights of a checkpoint as whole tensors, without an engine.

    Args:
        store: the store.
        step: the step; by default the newest consistent checkpoint.
        run: the run.
        part: key of the engine in the state.

    Raises:
        InvalidInputError: the state has no engine under this key.
        CheckpointNotFoundError, InconsistentCheckpointError, HeadRecordError: see :meth:`asymcheck.Store.load`.
    """
    # One glob reads weights and shapes from the same checkpoint.
    state: Any = store.load(step, run=run, tensors=f"{part}.[ws][eh]*")
    for key in part.split("."):
        state = state.get(key) if isinstance(state, Mapping) else None
    if not isinstance(state, Mapping) or not state.keys() >= {"weights", "shapes"}:
        raise InvalidInputError(f"{part} is no state of a DeepSpeed engine; give the key of the engine in the state")
    shapes = state["shapes"]
    return {name: flat.view(shapes[name]) for name, flat in state["weights"].items()}


def _check(engine: Any) -> None:  # noqa: ANN401 - as above
    stage = engine.zero_optimization_stage() if hasattr(engine, "zero_optimization_stage") else None
    if stage not in _STAGES:
        raise InvalidInputError(
            f"{type(engine).__name__} of ZeRO stage {stage} is not supported; pass a DeepSpeed engine of stage 1, 2 or "
            "3, or save engine.module and engine.optimizer of a stage 0 engine directly"
        )
    optimizer = engine.optimizer
    unsupported = {
        "experts (MoE)": engine.has_moe_layers,
        "pipeline stages": engine.pipeline_parallelism,
        "tensor parallelism": engine.mp_world_size > 1,
        "an optimizer swapped to NVMe": getattr(optimizer, "swap_optimizer", False),
        "parameters swapped to NVMe": getattr(optimizer, "params_in_nvme_and_cpu", False),
        "a partly offloaded optimizer": hasattr(optimizer, "backup_optimizer"),
        "ZenFlow": getattr(optimizer, "zenflow", False),
        "a gradient scaler of torch.autocast": getattr(optimizer, "torch_autocast_gradscaler", None),
        "no optimizer": not hasattr(optimizer, "optimizer"),
    }
    used = [feature for feature, is_used in unsupported.items() if is_used]
    if used:
        raise InvalidInputError(
            f"EngineState does not support an engine with {' and '.join(used)}; use engine.save_checkpoint() instead"
        )


def _trained_ranges(engine: Any) -> Iterator[_Range]:  # noqa: ANN401 - as above
    """Yield this rank's range of the fp32 weights for each trained parameter."""
    optimizer = engine.optimizer
    if engine.zero_optimization_stage() == _SHARDED_STAGE:
        for number, parameters in enumerate(optimizer.fp16_groups):
            flat, first = optimizer.fp32_partitioned_groups_flat[number], 0
            for parameter in parameters:
                group = optimizer.sub_group_to_group_id[number]
                yield _partitioned(engine, parameter, flat, first, group)
                first += parameter.partition_numel()
        return
    # DeepSpeed's own links from parameters to ranges are wrong with round_robin_gradients.
    groups = getattr(optimizer, "round_robin_bit16_groups", None) or optimizer.bf16_groups
    for number, parameters in enumerate(groups):
        (flat,) = optimizer.param_groups[number]["params"]
        begin = dist.get_rank(optimizer.real_dp_process_group[number]) * flat.numel()
        for parameter, offset in zip(parameters, _offsets(optimizer, number, parameters), strict=True):
            first, last = max(begin, offset), min(begin + flat.numel(), offset + parameter.numel())
            start, first, count = (first - offset, first - begin, last - first) if first < last else (0, 0, 0)
            yield _Range(engine.param_names[parameter], parameter.shape, start, flat, first, count, number)


def _offsets(optimizer: Any, group: int, parameters: list[Any]) -> list[int]:  # noqa: ANN401 - as above
    if hasattr(optimizer, "round_robin_bit16_offsets"):
        return list(optimizer.round_robin_bit16_offsets[group])
    return list(itertools.accumulate((parameter.numel() for parameter in parameters), initial=0))[:-1]


def _frozen_ranges(engine: Any) -> Iterator[_Range]:  # noqa: ANN401 - as above
    """Yield all frozen parameters; in stage 3, this rank's range of each."""
    trained = {part.name for part in _trained_ranges(engine)}
    for name, parameter in engine.module.named_parameters():
        if name in trained:
            continue
        if hasattr(parameter, "ds_id"):
            yield _partitioned(engine, parameter, parameter.ds_tensor, 0, 0)
        else:
            yield _Range(name, parameter.shape, 0, parameter, 0, parameter.numel())


def _partitioned(engine: Any, parameter: Any, flat: torch.Tensor, first: int, group: int) -> _Range:  # noqa: ANN401 - as above
    """Return the range of a stage 3 parameter. All ranks have equal shards, the last ones with padding."""
    size, whole = parameter.partition_numel(), parameter.ds_numel
    ranks = engine.optimizer.dp_process_group
    if size != -(-whole // dist.get_world_size(ranks)):
        raise InvalidInputError(
            "MiCS (parameters partitioned over some ranks only) is not supported; use engine.save_checkpoint()"
        )
    start = min(whole, dist.get_rank(ranks) * size)
    return _Range(
        engine.param_names[parameter], parameter.ds_shape, start, flat, first, min(size, whole - start), group
    )


def _buffers(module: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    for prefix, part in module.named_modules():
        for name, buffer in part.named_buffers(recurse=False):
            if name not in part._non_persistent_buffers_set:  # noqa: SLF001 - torch has no public name for it
                yield f"{prefix}.{name}".lstrip("."), buffer


def _numbers(scaler: object) -> dict[str, object]:
    """Return the scale and the counters of a loss scaler."""
    return {name: value for name, value in getattr(scaler, "__dict__", {}).items() if type(value) in (bool, int, float)}
