"""Check a run's settings for some hardware, before anything is traced or planned."""

from __future__ import annotations

from rl_vlm.config.batches import batch_sizes
from rl_vlm.config.schema import RunConfig
from rl_vlm.distributed.optim import refuse_shards
from rl_vlm.distributed.shardings import Sharding
from rl_vlm.model.sharding import refuse_initialisation, refuse_quantization
from rl_vlm.rollout.vllm.build import beside_ranks


def check_setup(config: RunConfig, sharding: Sharding, num_ranks: int) -> None:
    """Raise the error of the run if its settings do not work with this sharding and number of ranks.

    Packages need not be installed.
    """
    batch_sizes(config, num_ranks)
    if config.rollout.facts.spans_ranks:
        beside_ranks(config, num_ranks)
    refuse_shards(config.train.optim, sharding.name, sharding.shards_state)
    if sharding.shards_weights:
        refuse_quantization(config.model, sharding.name)
        refuse_initialisation(config.model, sharding.name)
