"""One rank of benchmarks/sharding.py, which starts this script with `accelerate launch`.

    python benchmarks/sharded_rank.py '{"checkpoint": …, "shape": …, "beta": 0.0, "num_timed": 3}' OUTPUT

Loads a model and takes optimizer steps through a strategy, as a training run does, and saves it. Writes what was
measured to OUTPUT/rank-R.json. `num_timed` is the number of steps that are timed; if it is 0, traffic is not counted.
"""

from __future__ import annotations

import dataclasses
import json
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))  # run as a script

from benchmarks.communication import CountTraffic
from benchmarks.flops import Workload
from benchmarks.resident import Resident, held_bytes, live_bytes, local_weights, resident_bytes, storage_bytes
from benchmarks.shapes import SHAPES, make_group, make_prompt, micro_batch
from rl_vlm.config.schema import RunConfig
from rl_vlm.distributed.optimizer import Optimizer
from rl_vlm.distributed.optimizer_files import OptimizerFiles
from rl_vlm.distributed.ranks import Ranks
from rl_vlm.distributed.strategy import select_strategy
from rl_vlm.model.loading import load_policy
from rl_vlm.model.reference import load_reference
from rl_vlm.model.saving import PolicyFiles
from rl_vlm.types import Forward

WORK = Workload(image_tokens=16, text_tokens=40, completion_tokens=16, num_generations=2)
"""A small group, so that memory is that of weights, gradients and moments."""


class ShardedRank:
    """A model on this rank, and what was measured of it so far."""

    def __init__(self, case: dict[str, Any]) -> None:
        """Load and place the model, measuring memory."""
        self.config = run_config(case)
        self.ranks = Ranks()
        self.strategy = select_strategy(self.ranks, self.config)
        checkpoint = case["checkpoint"]
        self.prompt = make_prompt(Path(checkpoint), WORK, SHAPES[case["shape"]])
        self.warm_up()
        self.resident = Resident()
        empty = self.strategy.loads_empty
        with self.resident.stage("loading"):
            self.policy = load_policy(self.config, checkpoint, empty=empty)
            self.strategy.place(self.policy)
        with self.resident.stage("reference"):
            self.reference = load_reference(self.config, checkpoint, self.policy, None, empty)
            if self.reference is not None:
                self.strategy.place_frozen(self.reference.frozen)
        with self.resident.stage("preparing"):
            self.optimizer = Optimizer(self.strategy, self.policy.train(), self.config.train, num_steps=100)

    def warm_up(self) -> None:
        """Import the model's code and connect the ranks, which is no memory of the model."""
        import transformers.models.qwen2_5_vl.modeling_qwen2_5_vl  # noqa: F401

        self.ranks.sum([0.0])

    def backward(self, num_micro_batches: int) -> None:
        """Run forward and backward over the micro-batches of a step."""
        self.policy.start_step()
        for i in range(num_micro_batches):
            batch = micro_batch([make_group(dataclasses.replace(self.prompt), WORK)], shared=True)
            if self.reference is not None:
                self.reference(Forward(batch))
            with self.strategy.accumulating(last=i == num_micro_batches - 1):
                mean = self.optimizer.policy(Forward(batch)).logprobs_NT.mean()
                loss = -mean / num_micro_batches / self.ranks.world_size
                self.strategy.backward(loss)

    def update(self) -> None:
        self.strategy.reserve_update()
        assert self.strategy.update(loss_is_finite=True)[1]

    def step(self, num_micro_batches: int) -> None:
        """Take one optimizer step."""
        self.backward(num_micro_batches)
        self.update()
        self.strategy.clear_gradients()

    def measure_steps(self) -> dict[str, int]:
        """Measure memory of the second step, since the first makes the moments. Returns the bytes held by tensors."""
        self.step(1)
        with self.resident.stage("backward"):
            self.backward(1)
        live = live_bytes()
        with self.resident.stage("update"):
            self.update()
        held = held_bytes(self.policy, self.optimizer.torch_optimizer)
        frozen = self.reference.frozen if self.reference else None
        held["reference"] = storage_bytes(local_weights(frozen)) if frozen else 0
        self.strategy.clear_gradients()
        return held | {"live after backward": live, "live between steps": live_bytes()}

    def traffic(self, num_micro_batches: int) -> dict[str, Any]:
        """Return the bytes that a step's collectives move: by kind, and as sent on a ring."""
        with CountTraffic() as counter:
            self.step(num_micro_batches)
        return {"payloads": counter.payloads, "sent": counter.sent(self.ranks.world_size)}

    def seconds(self, num_steps: int) -> dict[str, list[float]]:
        """Return the seconds of some steps of one micro-batch, and those that this process computed."""
        clocks = {"passed": time.perf_counter, "computed": time.process_time}
        found: dict[str, list[float]] = {name: [] for name in clocks}
        for _ in range(num_steps):
            self.ranks.sum([0.0])
            start = {name: clock() for name, clock in clocks.items()}
            self.step(1)
            for name, clock in clocks.items():
                found[name].append(clock() - start[name])
        return found

    def gathered(self) -> dict[str, int]:
        """Return the bytes of tensors before, within and after the all-gather around a rollout."""
        found = {"before": live_bytes()}
        with self.strategy.gathered():
            found["within"] = live_bytes()
        return found | {"after": live_bytes()}

    def save(self) -> None:
        """Measure memory while the files of a checkpoint are gathered and written."""
        from transformers import AutoProcessor

        processor = AutoProcessor.from_pretrained(self.config.model.model_name_or_path)
        self.before_saving = self.resident.growth("anonymous", resident_bytes())
        with tempfile.TemporaryDirectory() as directory, self.resident.stage("saving"):
            policy_files = PolicyFiles(self.policy, processor, self.ranks, in_parts=self.strategy.is_sharded)
            optimizer_files = OptimizerFiles(self.optimizer, self.ranks)
            policy_files.write(Path(directory))
            optimizer_files.write(Path(directory))


def run_config(case: dict[str, Any]) -> RunConfig:
    """Return the settings of a run with full fine-tuning and gradient checkpointing."""
    return RunConfig.model_validate(
        {
            "model": {"model_name_or_path": case["checkpoint"]},
            "algorithm": {"beta": case["beta"]},
            "memory": {"gradient_checkpointing": True},
        }
    )


def measure(case: dict[str, Any]) -> dict[str, Any]:
    """Measure everything on this rank."""
    rank = ShardedRank(case)
    result = {
        "strategy": rank.strategy.name,
        "world_size": rank.ranks.world_size,
        "held": rank.measure_steps(),
        "seconds": rank.seconds(case["num_timed"]),
        "traffic": {n: rank.traffic(n) for n in (1, 3)} if case["num_timed"] else {},
        "gathered": rank.gathered(),
    }
    rank.save()
    result |= {"before_saving": rank.before_saving, "after": rank.resident.after, "peaks": rank.resident.peaks}
    rank.ranks.close()
    return result


def main() -> None:
    case, output = json.loads(sys.argv[1]), Path(sys.argv[2])
    result = measure(case)
    (output / f"rank-{os.environ.get('RANK', '0')}.json").write_text(json.dumps(result))


if __name__ == "__main__":
    main()
