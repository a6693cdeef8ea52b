"""Configurations of :mod:`tests.integrations.deepspeed_ranks`."""

from typing import Any

STEPS, EVERY, KILLED_IN, COMPARED = 8, 2, 7, 4
MICRO_STEPS = 2
BF16 = {"bf16": {"enabled": True}}
CONFIGS: dict[str, dict[str, Any]] = {
    "one": {"zero_optimization": {"stage": 1}, **BF16},
    # Another optimizer of DeepSpeed, which accumulates gradients in fp32.
    "one-sums": {"zero_optimization": {"stage": 1}, "data_types": {"grad_accum_dtype": "fp32"}, **BF16},
    # The initial loss scale is too large, so the first checkpoint precedes the first real step.
    "two": {
        "zero_optimization": {"stage": 2, "round_robin_gradients": True},
        "fp16": {"enabled": True, "initial_scale_power": 22, "hysteresis": 1},
    },
    # Small enough that some parameters are not partitioned, and that a group is stepped in several parts.
    "three": {
        "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 20, "sub_group_size": 60},
        **BF16,
    },
    "three-fp32": {"zero_optimization": {"stage": 3}},
}
