"""Table of the engines that sample completions. Code that depends on the engine reads its row.

The module imports nothing heavy: a row names the functions that build its engine, as `module:function`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal


@dataclass(frozen=True, kw_only=True)
class Engine:
    """Properties of an engine."""

    title: str
    """Name of the engine in messages."""
    training: str
    """Function that builds the engine for a run: `training_engine` in rl_vlm/rollout/build.py has its arguments."""
    evaluation: str
    """Function that builds it for a checkpoint: `evaluation_engine` in rl_vlm/rollout/build.py has its arguments."""
    memory: str | None = None
    """Function that plans the engine's bytes on a rank's device: `plan_rollouts` in rl_vlm/plan/build.py has its
    arguments. None: the engine holds none."""
    package: str | None = None
    """Package to install for it. None: it needs no further package."""
    reads: frozenset[str] = frozenset()
    """Settings of the section `vllm` that it reads."""

    samples_from_policy: bool = False
    """Its log-probs are the policy's own: the trained model itself samples, in the trainer's arithmetic."""
    has_own_weights: bool = True
    """It has a copy of the weights, and gets updates. Otherwise the policy's weights are gathered for a rollout."""
    shares_device: bool = True
    """It runs in the trainer's processes, and cannot sample while they train."""
    reserves_memory: bool = False
    """It takes `vllm_gpu_memory_utilization` of the cards that also train."""
    spans_ranks: bool = False
    """Neighbouring ranks share one of its models if `vllm_tensor_parallel_size` is above 1."""
    uses_servers: bool = False
    """It samples on servers, which a run starts or joins."""
    passes_shared_memory: bool = False
    """Its processes pass tensors through /dev/shm."""
    takes_expandable_segments: bool = False
    """It works with PyTorch's expandable segments."""
    samples_4_bit_weights: bool = False
    """It samples from weights that bitsandbytes holds in 4 bits."""
    has_untruncated_logprobs: bool = False
    """It computes log-probs before `top_p`, `top_k` and `min_p`, as training needs them."""


VLLM = frozenset(
    """
    vllm_model_impl vllm_model_runner vllm_gpu_memory_utilization vllm_max_model_length vllm_tensor_parallel_size
    vllm_enforce_eager vllm_max_logp_difference
    """.split()
)
"""Settings that vLLM reads wherever it runs."""
VLLM_IN_PROCESS = VLLM | {"vllm_enable_sleep_mode"}
VLLM_ON_SERVERS = VLLM | {
    "vllm_server_base_url", "vllm_num_servers", "vllm_server_devices", "vllm_server_timeout", "vllm_request_timeout",
    "vllm_weight_transfer",
}  # fmt: skip
VLLM_SETTINGS = VLLM_IN_PROCESS | VLLM_ON_SERVERS
READ_BY_STARTED_SERVERS = (
    "vllm_model_impl", "vllm_model_runner", "vllm_gpu_memory_utilization", "vllm_max_model_length",
    "vllm_tensor_parallel_size", "vllm_enforce_eager", "vllm_num_servers", "vllm_server_devices",
)  # fmt: skip
"""Settings that a server reads when it starts. A run that joins the server ignores them."""

ENGINES: dict[str, Engine] = {
    "hf": Engine(
        title="the trained model",
        training="rl_vlm.rollout.hf:training_engine",
        evaluation="rl_vlm.rollout.hf:evaluation_engine",
        memory="rl_vlm.plan.build:policy_rollouts",
        samples_from_policy=True,
        has_own_weights=False,
        takes_expandable_segments=True,
        samples_4_bit_weights=True,
        has_untruncated_logprobs=True,
    ),
    "vllm": Engine(
        title="vLLM",
        training="rl_vlm.rollout.vllm.build:training_engine",
        evaluation="rl_vlm.rollout.vllm.build:evaluation_engine",
        memory="rl_vlm.plan.build:vllm_rollouts",
        package="vllm",
        reads=VLLM_IN_PROCESS,
        reserves_memory=True,
        spans_ranks=True,
        passes_shared_memory=True,
    ),
    "vllm_server": Engine(
        title="vLLM",
        training="rl_vlm.rollout.vllm.build:training_servers",
        evaluation="rl_vlm.rollout.vllm.build:evaluation_servers",
        package="vllm",
        reads=VLLM_ON_SERVERS,
        shares_device=False,
        uses_servers=True,
        passes_shared_memory=True,
    ),
}
"""Engines by the value of `rollout.engine`."""

if TYPE_CHECKING:
    EngineName = str
else:  # so that pydantic lists the names in messages and in the schema
    EngineName = Literal[tuple(ENGINES)]


def engine_named(name: Any) -> Engine | None:
    """Return the row of an engine, or None if no engine has this name."""
    return ENGINES.get(name) if isinstance(name, str) else None


def engines_where(holds: Callable[[Engine], bool]) -> list[str]:
    """Return the names of the engines for which `holds` returns true, in the order of the table."""
    return [name for name, engine in ENGINES.items() if holds(engine)]
