"""Trajectories with slow tools: how long the engine waits for them, in waves and with each trajectory on its own.

    python benchmarks/slow_tools.py --json result.json

The engine is simulated: it samples any number of turns at once, each in 0.5 to 1.5 times `--turn-seconds`.
Tools take log-normal times, between `--fastest` and `--slowest` seconds. Both sides have the same times, and everything
else is the run's own code. The times are waits, so other programs hardly change them.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))  # run as a script

import numpy as np
import torch

from benchmarks.common import environment, markdown_table
from benchmarks.report import finish, result_arguments
from rl_vlm.config.schema import RunConfig
from rl_vlm.data.prompts import PromptBuilder, load_processor
from rl_vlm.distributed.ranks import Ranks
from rl_vlm.rollout.engine import Submitted
from rl_vlm.rollout.environments.build import build_trajectories, choose_turns
from rl_vlm.rollout.environments.loading import load_toolbox
from rl_vlm.tiny.build import build_tiny
from rl_vlm.types import Completion, Group, RolloutRequest, Sample, Sampling

WORKLOAD = (
    "prompts num_generations min_turns max_turns turn_seconds median sigma fastest slowest max_environments".split()
)


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--num-generations", type=int, default=8)
    parser.add_argument("--min-turns", type=int, default=2)
    parser.add_argument("--max-turns", type=int, default=6)
    parser.add_argument("--turn-seconds", type=float, default=2.0)
    parser.add_argument("--median", type=float, default=1.0, help="of the seconds of a tool")
    parser.add_argument("--sigma", type=float, default=1.2, help="of the logarithm of the seconds of a tool")
    parser.add_argument("--fastest", type=float, default=0.1)
    parser.add_argument("--slowest", type=float, default=20.0)
    parser.add_argument("--max-environments", type=int, help="trajectories at once; default: all")
    result_arguments(parser)
    return parser.parse_args(arguments)


def drawn(name: str) -> np.random.Generator:
    """Return the random numbers of a turn or a tool, which both sides have."""
    return np.random.default_rng(list(name.encode()))


class SlowTool:
    """An environment whose steps take long. A turn is its own name: prompt, completion and number."""

    def __init__(self, median: float, sigma: float, fastest: float, slowest: float) -> None:
        self.median, self.sigma, self.fastest, self.slowest = median, sigma, fastest, slowest

    def reset(self, **columns: Any) -> str:
        return "Go."

    def step(self, text: str) -> tuple[str, float, bool, dict[str, Any]]:
        seconds = self.median * np.exp(self.sigma * drawn(f"tool {text}").standard_normal())
        time.sleep(float(np.clip(seconds, self.fastest, self.slowest)))
        return "Done.", 0.0, text.endswith("last"), {}


class SimulatedEngine:
    """Samples the names of turns, in the time that a turn would take."""

    policy_version = 0

    def __init__(self, args: argparse.Namespace, tokenizer: Any, stop: int) -> None:
        self.args, self.tokenizer, self.stop = args, tokenizer, stop
        self.counters: Counter[str] = Counter()

    def sample(self, group_id: str, index: int, completion: Completion) -> Completion:
        """Wait as long as the turn takes, and return the completion with it."""
        number, args = len(completion.turns), self.args
        last = drawn(f"turns {group_id} {index}").integers(args.min_turns, args.max_turns + 1) == number + 1
        name = f"{group_id} {index} {number}" + " last" * bool(last)
        time.sleep(args.turn_seconds * (0.5 + drawn(f"turn {name}").random()))
        ids = [*self.tokenizer(name, add_special_tokens=False)["input_ids"], self.stop]
        return completion.continued(torch.tensor(ids), torch.zeros(len(ids)), "stop", name)

    def sync(self, source: Any, version: int) -> int:
        """Move no weights: there are none."""
        return 0

    def sleep(self) -> bool:
        """Return True: the engine holds no memory."""
        return True

    def close(self) -> None:
        """Do nothing: the engine holds nothing."""

    def generate(self, requests: Sequence[RolloutRequest], sampling: Sampling) -> list[Group]:
        """Sample a wave."""
        with ThreadPoolExecutor(1024) as pool:
            sampled = [
                [pool.submit(self.sample, r.group_id, i, c) for i, c in r.paused(sampling.num_generations).items()]
                for r in requests
            ]
            return [r.group([f.result() for f in some], 0) for r, some in zip(requests, sampled, strict=True)]


class SimulatedServers(SimulatedEngine):
    """Takes turns at any time."""

    @contextmanager
    def session(self, sampling: Sampling) -> Iterator[Any]:
        with ThreadPoolExecutor(1024) as pool:
            yield SimulatedSession(self, pool, sampling)


class SimulatedSession:
    def __init__(self, engine: SimulatedServers, pool: ThreadPoolExecutor, sampling: Sampling) -> None:
        self.engine, self.pool, self.sampling = engine, pool, sampling

    def submit(self, request: RolloutRequest) -> Submitted:
        ((index, completion),) = request.paused(self.sampling.num_generations).items()
        future = self.pool.submit(self.engine.sample, request.group_id, index, completion)
        return Submitted(future, lambda sampled: request.group([sampled], 0))


SIDES = {"in waves": SimulatedEngine, "independently": SimulatedServers}


def config_of(args: argparse.Namespace, checkpoint: Path) -> RunConfig:
    names = ("median", "sigma", "fastest", "slowest")
    rollout = {
        "environment": f"{__file__}:SlowTool", "environment_protocol": "steps", "max_turns": args.max_turns,
        "environment_kwargs": {name: getattr(args, name) for name in names}, "max_completion_length": 4096,
        "num_generations": args.num_generations, "max_environments": args.max_environments,
    }  # fmt: skip
    model, data = {"model_name_or_path": str(checkpoint)}, {"dataset_name": "draws:8", "text_only": True}
    return RunConfig.model_validate({"model": model, "data": data, "rollout": rollout})


def run(args: argparse.Namespace, side: str, checkpoint: Path) -> dict[str, Any]:
    """Generate all trajectories, and return the seconds and a digest of what was sampled."""
    config = config_of(args, checkpoint)
    builder = PromptBuilder(load_processor(str(checkpoint), config.model, config.data), config.data)
    toolbox = load_toolbox(config.rollout)
    turns = choose_turns(config, str(checkpoint), builder, toolbox)
    trajectories = build_trajectories(config, toolbox, turns, False, Ranks())
    messages = [{"role": "user", "content": [{"type": "text", "text": ""}]}]
    sample = Sample("s", messages, [], {}, messages)
    requests = [RolloutRequest(str(p), turns.builder.build(sample)) for p in range(args.prompts)]
    tokenizer = builder.processor.tokenizer
    engine = SIDES[side](args, tokenizer, tokenizer.eos_token_id)
    groups = trajectories.generate(engine, requests, Sampling(args.num_generations, 4096, 1.0, seed=0))
    trajectories.close()
    clock = trajectories.clock
    sampled = [completion.token_ids.tolist() for group in groups for completion in group.completions]
    return {"seconds": clock.total, "engine_waits": clock.waited / clock.total, "sampled": sampled}


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Measure both sides. Raises AssertionError if they have sampled other tokens."""
    with tempfile.TemporaryDirectory() as temporary:
        checkpoint = build_tiny("qwen2_5_vl", Path(temporary) / "model")
        sides = {side: run(args, side, checkpoint) for side in SIDES}
    one, other = (side.pop("sampled") for side in sides.values())
    assert one == other, "in waves, other tokens were sampled than independently"
    workload = {name: getattr(args, name) for name in WORKLOAD}
    return {"benchmark": "slow_tools", "workload": workload, "sides": sides, **environment()}


def table(result: dict[str, Any]) -> str:
    rows = [
        [side, f"{found['seconds']:.1f}", f"{found['engine_waits']:.2f}"] for side, found in result["sides"].items()
    ]
    return markdown_table(["trajectories advance", "seconds", "share in which the engine waits"], rows)


def main() -> None:
    args = parse()
    measured = measure(args)
    finish(measured, table(measured), args)


if __name__ == "__main__":
    main()
