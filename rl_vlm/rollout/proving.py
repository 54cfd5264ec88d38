"""The proof of a model that an engine samples from, where nothing is trained: in evaluations and in a chat."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from rl_vlm.config.schema import RunConfig
from rl_vlm.distributed.collectives import Collectives
from rl_vlm.model.policy import Policy
from rl_vlm.passes.checked_groups import unscored
from rl_vlm.passes.proof import ROWS, Proof, ProofCheck
from rl_vlm.passes.rounds import Rounds
from rl_vlm.passes.start_check import StartCheck
from rl_vlm.rollout.engine import RolloutEngine
from rl_vlm.rollout.hf import HFEngine
from rl_vlm.types import Group

logger = logging.getLogger(__name__)


class EngineCheck:
    """Proves the model of an engine once, with the first groups that it has sampled. Ranks do so independently."""

    def __init__(self, config: RunConfig, engine: RolloutEngine) -> None:
        self.config = config
        self.engine = engine
        policy = engine.policy if isinstance(engine, HFEngine) else None
        self.policy = policy if isinstance(policy, Policy) else None
        self.proof = Proof()
        self.is_due = config.model.verify != "off" and self.policy is not None
        if config.model.verify != "off" and self.policy is None:
            self.proof.checks.append(ProofCheck(ROWS, untried=why_no_policy(config)))
            logger.info("%s", self.proof.checks[-1])

    def run(self, groups: Sequence[Group]) -> None:
        """Check some of the groups, if the check is due. Raises ModelError if a check does not hold."""
        assert self.policy is not None, "a check without a policy is not due"
        self.is_due = False
        check = StartCheck(self.config, Rounds.of_untrained(self.config, Collectives(self.policy.device), self.policy))
        try:
            check.run([unscored(group) for group in groups], self.engine.policy_version)
        finally:
            self.proof = check.proof


def why_no_policy(config: RunConfig) -> str:
    """Return why the rows of an engine cannot be computed in another way."""
    if config.evaluation.endpoint_url is not None:
        return "a server samples, and no model is loaded here"
    return f"{config.rollout.facts.title} samples with a model of its own, and no other is loaded"
