"""DeepSpeed ZeRO 1, 2 and 3: the state of an engine on every rank.

ZeRO concatenates the trained parameters of a group in fp32, and each rank has one piece of that, with the optimizer's
state of the piece. A rank has a range of each flattened parameter, and it is stored as a :class:`asymcheck.TensorShard`
of one dimension, without padding. Therefore the names and shapes in a checkpoint depend neither on the number of ranks
nor on the stage.

The package ``deepspeed`` is not imported here, because an engine has everything that is needed.
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
from asymcheck.state.shards import TensorShard
from asymcheck.store import Store

_STAGES = (1, 2, 3)
_SHARDED_STAGE = 3  # in this stage ranks have parts of the low-precision parameters, too
_COUNTERS = ("global_steps", "global_samples", "micro_steps", "skipped_steps")
_KEYS = frozenset(
    {"weights", "frozen", "shapes", "buffers", "optimizer", "groups"}
    | {"scalars", "lr_scheduler", "loss_scaler", "counters"}
)
_State = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class _Range:
    """The range of a flattened parameter that this rank has; its elements are contiguous in a flat tensor."""

    name: str
    shape: torch.Size  # of the whole parameter
    start: int  # first element in the flattened parameter
    flat: torch.Tensor
    first: int  # first element in the flat tensor
    count: int  # elements; 0 where all is on other ranks
    group: int = 0  # number of the optimizer's parameter group

    def of(self, flat: torch.Tensor) -> TensorShard:
        """Return the range of a tensor with the layout of the flat one."""
        whole = (math.prod(self.shape),)
        return TensorShard(flat.detach().view(-1).narrow(0, self.first, self.count), whole, (self.start,))

    def fill(self, flat: torch.Tensor, found: object) -> None:
        """Fill the range of such a tensor from a restored value, which is a tensor, or the range itself."""
        if isinstance(found, TensorShard):
            found = found.local
        target = self.of(flat)
        if not isinstance(found, torch.Tensor):
            raise StateMismatchError(f"{self.name}: {type(found).__name__} is stored where a tensor is expected")
        if found.numel() != self.count:
            found = found.view(-1)[self.start : self.start + self.count]
        if found.data_ptr() != target.local.data_ptr():
            target.local.copy_(found)


class EngineState:
    """The state of a DeepSpeed engine, for :class:`asymcheck.Checkpointer` on each rank.

    Use it so::

        engine, *_ = deepspeed.initialize(model=model, config=config)
        state = {"engine": EngineState(engine), "rng": asymcheck.RngState()}
        with asymcheck.Checkpointer(store, state, every=50) as ckpt:
            restored = ckpt.restore()
            ...
            engine.step()
            ckpt.step(engine.global_steps)

    It holds the fp32 weights and the optimizer's state in parts, frozen parameters, buffers, the options of parameter
    groups, the schedule of learning rates, the loss scale and the engine's counters.
    """

    def __init__(self, engine: Any) -> None:  # noqa: ANN401 - the package has no types
        """Describe ``engine``, which stays the caller's.

        Raises:
            InvalidInputError: it is not an engine of ZeRO 1, 2 or 3, or has parts that are not supported.
        """
        _check(engine)
        self._engine = engine
        self._is_stale = False
        engine.module.register_forward_pre_hook(lambda *_: self.settle())

    def state_dict(self) -> _State:
        """Return the state; tensors in it are the engine's own.

        Raises:
            InvalidInputError: gradients are being accumulated, which would not be saved.
            UnsupportedValueError: the optimizer has state that is not one value for each element.
        """
        engine = self._engine
        if engine.micro_steps % engine.gradient_accumulation_steps():
            raise InvalidInputError(
                f"{engine.micro_steps} micro steps were done, of which {engine.gradient_accumulation_steps()} make a "
                "step: save and restore when engine.step() has taken one, for gradients being summed up are not saved"
            )
        trained, fixed = list(_trained(engine)), list(_fixed(engine))
        scheduler = engine.lr_scheduler
        return {
            "weights": {one.name: one.of(one.flat) for one in trained},
            "frozen": {one.name: one.of(one.flat) for one in fixed},
            "shapes": {one.name: one.shape for one in (*trained, *fixed)},
            "buffers": dict(_buffers(engine.module)),
            "optimizer": {one.name: self._elementwise(one) for one in trained},
            "groups": groups_of(self.optimizer),
            "scalars": self._scalars(trained),
            "lr_scheduler": None if scheduler is None else scheduler.state_dict(),
            "loss_scaler": _numbers(getattr(engine.optimizer, "loss_scaler", None)),
            "counters": {name: getattr(engine, name) for name in _COUNTERS},
        }

    def _elementwise(self, one: _Range) -> dict[str, TensorShard]:
        return {
            key: one.of(value)
            for key, value in self.optimizer.state.get(one.flat, {}).items()
            if isinstance(value, torch.Tensor) and value.shape == one.flat.shape
        }

    def _scalars(self, trained: list[_Range]) -> list[_State]:
        """Return, for each group, the optimizer's state that is not elementwise, such as the number of steps."""
        found: list[_State] = [{} for _ in self.optimizer.param_groups]
        for one in trained:
            for key, value in self.optimizer.state.get(one.flat, {}).items():
                if not isinstance(value, torch.Tensor) or value.ndim == 0:
                    found[one.group].setdefault(key, value)
                elif value.shape != one.flat.shape:
                    raise UnsupportedValueError(
                        f"optimizer.{one.name}.{key}",
                        f"{list(value.shape)} for {list(one.flat.shape)} parameters; ranks can share only state that "
                        "is one value for each",
                    )
        return found

    def load_state_dict(self, state_dict: _State) -> None:
        """Restore this rank's share of a state.

        Stages 1 and 2 gather the low-precision parameters from all ranks in :meth:`settle`.

        Raises:
            StateMismatchError: it belongs to another model or optimizer.
        """
        engine = self._engine
        for one in _trained(engine):
            one.fill(one.flat, state_dict["weights"][one.name])
            self._fill_optimizer(one, state_dict["optimizer"][one.name], state_dict["scalars"][one.group])
        for one in _fixed(engine):
            one.fill(one.flat, state_dict["frozen"][one.name])
        for name, buffer in _buffers(engine.module):
            found = state_dict["buffers"][name]
            if found is not buffer:
                buffer.copy_(found)
        set_groups(self.optimizer, state_dict["groups"])
        if engine.lr_scheduler is not None and state_dict["lr_scheduler"] is not None:
            engine.lr_scheduler.load_state_dict(state_dict["lr_scheduler"])
        scaler = getattr(engine.optimizer, "loss_scaler", None)
        for name, value in state_dict["loss_scaler"].items():
            if name in _numbers(scaler):
                setattr(scaler, name, value)
        for name in _COUNTERS:
            setattr(engine, name, state_dict["counters"][name])
        # With another number of ranks, a step may have another number of micro steps.
        engine.micro_steps -= engine.micro_steps % engine.gradient_accumulation_steps()
        self._is_stale = True
        if engine.zero_optimization_stage() == _SHARDED_STAGE or dist.get_world_size() == 1:
            self.settle()

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """The optimizer that ZeRO wraps; only its steps change the weights and its state."""
        wrapped: torch.optim.Optimizer = self._engine.optimizer.optimizer
        return wrapped

    def owned(self) -> Iterator[torch.Tensor]:
        """Yield the weights, and the elementwise state of the optimizer."""
        if any(group.get("use_muon") for group in self.optimizer.param_groups):
            # ZeRO writes its momentum before it calls the optimizer.
            return
        for one in _trained(self._engine):
            yield one.of(one.flat).local
            yield from (part.local for part in self._elementwise(one).values())

    def misfits(self, stored: Mapping[Key, Any]) -> Iterator[str]:
        """Yield the parts of a stored state that belong to another model or optimizer."""
        if not stored.keys() >= _KEYS:
            yield f"{', '.join(sorted(_KEYS - stored.keys()))}: is not in the checkpoint, which is of no engine"
            return
        given = {one.name: one.shape for one in (*_trained(self._engine), *_fixed(self._engine))}
        for name in given.keys() | stored["shapes"].keys():
            here, there = given.get(name), stored["shapes"].get(name)
            if here != there:
                texts = ["nothing" if shape is None else str(list(shape)) for shape in (here, there)]
                yield f"shapes.{name}: {texts[0]} is given, but {texts[1]} is stored"
        trained = {one.name for one in _trained(self._engine)}
        for name in sorted(trained ^ stored["weights"].keys()):
            yield f"weights.{name}: is trained here or in the checkpoint, and not in the other"
        if len(self.optimizer.param_groups) != len(stored["groups"]):
            counts = len(self.optimizer.param_groups), len(stored["groups"])
            yield f"groups: {counts[0]} groups of parameters are given, but {counts[1]} are stored"

    def missing(self, stored: Mapping[Key, Any]) -> Iterator[tuple[object, TensorShard]]:
        """Yield the state that the optimizer does not have before its first step."""
        for one in _trained(self._engine):
            for key, placeholder in stored.get("optimizer", {}).get(one.name, {}).items():
                if key not in self.optimizer.state.get(one.flat, {}):
                    yield placeholder, one.of(one.flat)

    def _fill_optimizer(self, one: _Range, found: Mapping[str, object], scalars: Mapping[str, object]) -> None:
        states = self.optimizer.state
        if not found and not scalars:
            # The checkpoint was taken before the first step.
            states.pop(one.flat, None)
            self._engine.optimizer._hp_optimizer_states_linked = False  # noqa: SLF001 - links them anew after a step
            return
        state = states[one.flat]
        for key, part in found.items():
            if key not in state:
                dtype = part.local.dtype if isinstance(part, TensorShard) else getattr(part, "dtype", one.flat.dtype)
                state[key] = torch.zeros_like(one.flat, dtype=dtype, requires_grad=False)
            one.fill(state[key], part)
        options = self.optimizer.param_groups[one.group]
        for key, value in scalars.items():
            if isinstance(value, torch.Tensor):
                # As torch's optimizers have it.
                device = one.flat.device if options.get("capturable") or options.get("fused") else value.device
                state[key] = value.to(device, copy=True)
            else:
                state[key] = value

    def settle(self) -> None:
        """Update the low-precision parameters from the fp32 weights after a restore.

        Ranks of stage 1 and 2 gather them from each other, so all ranks call it. :class:`asymcheck.Checkpointer`
        calls it when all ranks have been restored; after :meth:`asymcheck.Store.load`, the next forward does.
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
            # Parameters that every rank keeps whole are given up; the next forward gathers them again.
            optimizer.persistent_parameters[0].partition(optimizer.persistent_parameters)
        optimizer.invalidate_secondary_tensor()


def read_weights(
    store: Store, *, step: int | None = None, run: str = DEFAULT_RUN, part: str = "engine"
) -> dict[str, torch.Tensor]:
    """Return the trained fp32 weights of a checkpoint as whole tensors; no engine is needed.

    ``part`` is the key of the engine in the state.

    Raises:
        InvalidInputError: the state has no engine under this key.
        CheckpointNotFoundError, InconsistentCheckpointError, HeadRecordError: see :meth:`asymcheck.Store.load`.
    """
    # One glob for weights and shapes, which must come from the same checkpoint.
    state: Any = store.load(step, run=run, tensors=f"{part}.[ws][eh]*")
    for key in part.split("."):
        state = state[key]
    shapes = state["shapes"]
    return {name: flat.view(shapes[name]) for name, flat in state["weights"].items()}


def _check(engine: Any) -> None:  # noqa: ANN401 - as above
    stage = engine.zero_optimization_stage() if hasattr(engine, "zero_optimization_stage") else None
    if stage not in _STAGES:
        raise InvalidInputError(
            f"{type(engine).__name__} of ZeRO stage {stage}: give a DeepSpeed engine of stage 1, 2 or 3; of stage 0, "
            "give engine.module and engine.optimizer themselves"
        )
    optimizer = engine.optimizer
    refused = {
        "experts (MoE)": engine.has_moe_layers,
        "pipeline stages": engine.pipeline_parallelism,
        "tensor parallelism": engine.mp_world_size > 1,
        "an optimizer that is swapped to NVMe": getattr(optimizer, "swap_optimizer", False),
        "parameters that are swapped to NVMe": getattr(optimizer, "params_in_nvme_and_cpu", False),
        "an optimizer that is offloaded in part": hasattr(optimizer, "backup_optimizer"),
        "ZenFlow": getattr(optimizer, "zenflow", False),
        "a gradient scaler of torch.autocast": getattr(optimizer, "torch_autocast_gradscaler", None),
        "no optimizer": not hasattr(optimizer, "optimizer"),
    }
    found = [what for what, is_there in refused.items() if is_there]
    if found:
        raise InvalidInputError(f"the engine has {' and '.join(found)}, which EngineState cannot describe")


def _trained(engine: Any) -> Iterator[_Range]:  # noqa: ANN401 - as above
    """Yield all trained parameters, with this rank's ranges of the fp32 weights."""
    optimizer = engine.optimizer
    if engine.zero_optimization_stage() == _SHARDED_STAGE:
        for number, parameters in enumerate(optimizer.fp16_groups):
            flat, first = optimizer.fp32_partitioned_groups_flat[number], 0
            for parameter in parameters:
                group = optimizer.sub_group_to_group_id[number]
                yield _partitioned(engine, parameter, flat, first, group)
                first += parameter.partition_numel()
        return
    # DeepSpeed's links from parameters to ranges are not used: they are wrong with round_robin_gradients.
    groups = getattr(optimizer, "round_robin_bit16_groups", None) or optimizer.bf16_groups
    for number, parameters in enumerate(groups):
        (flat,) = optimizer.param_groups[number]["params"]
        begin = dist.get_rank(optimizer.real_dp_process_group[number]) * flat.numel()
        for parameter, offset in zip(parameters, _offsets(optimizer, number, parameters), strict=True):
            first, last = max(begin, offset), min(begin + flat.numel(), offset + parameter.numel())
            start, first, count = (first - offset, first - begin, last - first) if first < last else (0, 0, 0)
            yield _Range(engine.param_names[parameter], parameter.shape, start, flat, first, count, number)


def _offsets(optimizer: Any, group: int, parameters: list[Any]) -> list[int]:  # noqa: ANN401 - as above
    """Return where the parameters of a group begin in their concatenation."""
    if hasattr(optimizer, "round_robin_bit16_offsets"):
        return list(optimizer.round_robin_bit16_offsets[group])
    return list(itertools.accumulate((one.numel() for one in parameters), initial=0))[:-1]


def _fixed(engine: Any) -> Iterator[_Range]:  # noqa: ANN401 - as above
    """Yield all parameters that are not trained; in stage 3, this rank's ranges of them."""
    trained = {one.name for one in _trained(engine)}
    for name, parameter in engine.module.named_parameters():
        if name in trained:
            continue
        if hasattr(parameter, "ds_id"):
            yield _partitioned(engine, parameter, parameter.ds_tensor, 0, 0)
        else:
            yield _Range(name, parameter.shape, 0, parameter, 0, parameter.numel())


def _partitioned(engine: Any, parameter: Any, flat: torch.Tensor, first: int, group: int) -> _Range:  # noqa: ANN401 - as above
    """Describe a parameter of stage 3, of which all ranks have equal shares, the last ones with padding."""
    size, whole = parameter.partition_numel(), parameter.ds_numel
    ranks = engine.optimizer.dp_process_group
    if size != -(-whole // dist.get_world_size(ranks)):
        raise InvalidInputError("parameters are partitioned over some of the ranks only (MiCS): that is not supported")
    start = min(whole, dist.get_rank(ranks) * size)
    return _Range(
        engine.param_names[parameter], parameter.ds_shape, start, flat, first, min(size, whole - start), group
    )


def _buffers(module: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the buffers of the module's state_dict()."""
    for prefix, part in module.named_modules():
        for name, buffer in part.named_buffers(recurse=False):
            if name not in part._non_persistent_buffers_set:  # noqa: SLF001 - torch has no public name for it
                yield f"{prefix}.{name}".lstrip("."), buffer


def _numbers(scaler: object) -> dict[str, object]:
    """Return the numeric fields of a loss scaler: its scale and its counters."""
    return {name: value for name, value in getattr(scaler, "__dict__", {}).items() if type(value) in (bool, int, float)}
