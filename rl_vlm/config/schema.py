"""The settings of a run, and the table of all settings. `sections.py` defines them."""

from pydantic import model_validator
from pydantic.fields import FieldInfo

from rl_vlm.config.rules import CONFLICTS, WITHOUT_EFFECT, broken
from rl_vlm.config.sections import (
    AlgorithmConfig,
    DataConfig,
    DataSource,
    LogConfig,
    MemoryConfig,
    ModelConfig,
    RewardsConfig,
    RewardSpec,
    RolloutConfig,
    Section,
    Sections,
    SharedAttention,
    TrainConfig,
    VLLMConfig,
)

__all__ = [
    "SECTIONS", "SETTINGS", "AlgorithmConfig", "DataConfig", "DataSource", "LogConfig", "MemoryConfig",
    "ModelConfig", "RewardSpec", "RewardsConfig", "RolloutConfig", "RunConfig", "SharedAttention",
    "TrainConfig", "VLLMConfig",
]  # fmt: skip


class RunConfig(Sections):
    """The settings of a run. Combinations of settings are refused if they break a rule."""

    @model_validator(mode="after")
    def _check_combinations(self) -> "RunConfig":
        if problems := list(broken(self, WITHOUT_EFFECT + CONFLICTS)):
            raise ValueError("\n".join(problems))
        return self

    @property
    def shares_engines(self) -> bool:
        """Whether neighbouring ranks share an engine, and must call it equally often."""
        return self.rollout.facts.spans_ranks and self.vllm.vllm_tensor_parallel_size > 1


SECTIONS: dict[str, type[Section]] = {name: field.annotation for name, field in RunConfig.model_fields.items()}  # pyright: ignore[reportAssignmentType]

SETTINGS: dict[str, FieldInfo] = {
    f"{section}.{leaf}": field for section, model in SECTIONS.items() for leaf, field in model.model_fields.items()
}
"""Every setting by its full name, `section.leaf`."""
