"""vLLM in the trainer's process, on a random model: its start, sleep, weight syncs, and agreement of log-probs.

    start ─► sync ─► agreement ─► new weights ─► agreement (must fail) ─► sync ─► agreement ─► sleep, wake ─► agreement

The engine and the check are those of runs. New weights change the log-probs, also those of an adapter, which is zero at
first. The check after sleep finds weights that vLLM loses while it sleeps.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from benchmarks.flops import Training, Workload
from benchmarks.gpu_parts.bench import Bench
from benchmarks.gpu_parts.training_pass import new_group
from benchmarks.shapes import SHAPES, Shape
from benchmarks.sides import Setup, give_adapters_weights, stock_model
from benchmarks.training_phase import trainer_of
from rl_vlm.config.schema import RunConfig
from rl_vlm.data.prompts import PromptBuilder, load_processor
from rl_vlm.distributed.ranks import Ranks
from rl_vlm.errors import RolloutError, shorten
from rl_vlm.model.loading import load_policy
from rl_vlm.model.policy import Policy
from rl_vlm.passes.recovery import free_memory
from rl_vlm.rollout.agreement import AgreementCheck
from rl_vlm.rollout.build import training_engine
from rl_vlm.rollout.engine import SyncedEngine
from rl_vlm.rollout.vllm.in_process import KV_CACHE, WEIGHTS
from rl_vlm.rollout.weights import PolicyWeights
from rl_vlm.stages import Stage
from rl_vlm.trainer import Trainer
from rl_vlm.types import RolloutRequest, Sampling

HEAD = ("step", "seconds", "device_gib", "sent_gib", "mean_gap", "tokens_per_s", "note")
SMALL: Shape = (
    SHAPES["toy"][0] | {"hidden_size": 128, "mrope_section": [4, 6, 6], "tie_word_embeddings": False},
    SHAPES["toy"][1],
)
"""Heads of 32 dimensions, since vLLM has no kernel for the toy's. On CPUs, vLLM keeps a packed copy of a tied LM head,
which a sync does not renew."""
NUM_PROMPTS = 8
"""Prompts of the timed rollout, with 8 completions each."""
Figures = dict[str, Any]
"""A row of the table, or a part of it."""


@dataclass(frozen=True)
class Trial:
    """A policy and vLLM beside it, as a run has them."""

    bench: Bench
    setup: Setup
    trainer: Trainer
    engine: SyncedEngine
    check: AgreementCheck

    @staticmethod
    def start(bench: Bench, setup: Setup, trainer: Trainer) -> Trial:
        """Start vLLM, which then sleeps if it can."""
        config, checkpoint, ranks = trainer.config, str(setup.checkpoint), Ranks()
        weights = PolicyWeights(trainer.policy, config.rollout.lora_sync)
        builder = PromptBuilder(load_processor(checkpoint, config.model, config.data), config.data)
        engine = SyncedEngine(training_engine(config, checkpoint, weights, builder, ranks), weights, ranks)
        return Trial(bench, setup, trainer, engine, AgreementCheck(config, ranks, engine))

    def steps(self) -> dict[str, Callable[[], Figures]]:
        """Return what is measured after the start, in order."""
        return {
            "first sync": self.sync,
            "agreement": self.agreement,
            "agreement before new weights are sent": self.disagreement,
            "sync of new weights": self.sync,
            "agreement after the sync": self.agreement,
            "wake up": self.wake,
            "rollout": self.rollout,
            "sleep": self.sleep,
            "wake up again": self.wake,
            "agreement after sleep": self.agreement,
        }

    def sync(self) -> Figures:
        """Send the weights of this version."""
        return {"sent_gib": self.engine.sync(self.trainer.progress.policy_version) / 2**30}

    def agreement(self) -> Figures:
        """Compare log-probs. vLLM sleeps afterwards."""
        if self.engine.sent_version < 0:
            return {"note": "sleep mode has discarded the weights"}
        groups = [new_group(self.setup, seed) for seed in range(2)]
        outputs = partial(self.trainer.passes.outputs, Stage.CHECK, self.trainer.policy)
        self.check.run(self.trainer.progress, groups, outputs)
        self.trainer.start_step()
        assert self.check.last is not None
        return {"mean_gap": self.check.last.mean}

    def disagreement(self) -> Figures:
        """Change the weights, and expect that the check fails, since they are not sent yet.

        Raises RolloutError if it passes.
        """
        change_weights(self.trainer.policy)
        self.trainer.progress.policy_version += 1
        try:
            found = self.agreement()
        except RolloutError as error:
            return {"note": f"refused, as it must be: {shorten(error, 120)}"}
        if "mean_gap" in found:
            raise RolloutError(f"the check passes without the new weights: the mean is {found['mean_gap']:.3g}")
        return found

    def rollout(self) -> Figures:
        """Sample completions of full length."""
        work, groups = self.setup.work, []
        requests = [RolloutRequest(str(i), new_group(self.setup, i).group.prompt) for i in range(NUM_PROMPTS)]
        sampling = Sampling(work.num_generations, work.completion_tokens, temperature=1.0, seed=0)
        seconds = self.bench.seconds(lambda: groups.extend(self.engine.generate(requests, sampling)))
        return {"tokens_per_s": sum(len(c.token_ids) for group in groups for c in group.completions) / seconds}

    def sleep(self) -> Figures:
        """Let vLLM free its memory."""
        self.engine.sleep()
        return self.of_sleep_mode

    def wake(self) -> Figures:
        """Wake vLLM up. If it has discarded its weights, send them again."""
        if self.engine.sent_version < 0:
            return self.sync() | {"note": "the weights were sent again"}
        vllm: Any = self.engine.engine
        vllm.wake_up(WEIGHTS, KV_CACHE)
        return self.of_sleep_mode

    @property
    def of_sleep_mode(self) -> Figures:
        """The note of a machine without sleep mode."""
        return {} if self.bench.on_gpu else {"note": "not available: a CPU has no sleep mode"}


def measure(bench: Bench, lora_r: int) -> Iterator[Figures]:
    """Yield a row for each step. Raises RolloutError at the end if a check failed that must pass, or the reverse."""
    if find_spec("vllm") is None:
        yield {"step": "start", "note": "vLLM is not installed"}
        return
    with tempfile.TemporaryDirectory() as directory:
        setup, trainer = load(bench, Path(directory), lora_r)
        trials: list[Trial] = []
        seconds = bench.seconds(lambda: trials.append(Trial.start(bench, setup, trainer)))
        yield {"step": "start", "seconds": seconds} | device_memory(bench)
        steps, failed = trials[0].steps(), []
        for name in bench.in_time({name: name for name in steps}):
            row, error = measured(bench, steps[name])
            yield {"step": name} | row
            failed += [name] if error else []
        trials[0].engine.close()
    if failed:
        raise RolloutError(f"these steps failed: {', '.join(failed)}")


def load(bench: Bench, directory: Path, lora_r: int) -> tuple[Setup, Trainer]:
    """Write a random model, and load it as a run does."""
    work = Workload(24, 20, 16, 4) if bench.small else Workload(completion_tokens=128)
    shape = SMALL if bench.small else SHAPES["3b"]
    setup = Setup.build(shape, work, Training(lora_r=lora_r), directory, bench.device)
    stock_model(setup, setup.dtype).save_pretrained(directory)
    free_memory()
    config = run_config(bench, setup)
    return setup, trainer_of(config, load_policy(config, str(directory)).train())


def run_config(bench: Bench, setup: Setup) -> RunConfig:
    """Return the settings of a run with vLLM in its process."""
    settings = setup.config.model_dump()
    settings["rollout"] |= {"engine": "vllm", "max_num_seqs": 64}
    settings["vllm"] |= {
        "vllm_gpu_memory_utilization": 0.5,
        "vllm_enable_sleep_mode": bench.on_gpu,
        "vllm_max_logp_difference": 0.1 if bench.on_gpu else 1e-3,  # the default, and less in float32
        "vllm_max_model_length": max(256, setup.work.prompt_tokens + setup.work.completion_tokens + 64),
    }
    settings["memory"] |= {"micro_batch_tokens": 8192}
    return RunConfig.model_validate(settings)


def change_weights(policy: Policy) -> None:
    """Give the adapter random weights; without one, add noise to all matrices that are trained."""
    if policy.model is not policy.transformer:
        give_adapters_weights(policy.model)
        return
    generator = torch.Generator(policy.device).manual_seed(0)
    with torch.no_grad():
        for parameter in policy.parameters():
            if parameter.requires_grad and parameter.ndim > 1:
                parameter += 0.02 * torch.randn(parameter.shape, generator=generator, device=parameter.device)


def measured(bench: Bench, step: Callable[[], Figures]) -> tuple[Figures, RolloutError | None]:
    """Return the figures of a step, and its error. The error is also their note."""
    found: Figures = {}
    error = None
    start = time.perf_counter()
    try:
        found |= step()
    except RolloutError as raised:
        error = raised
        found["note"] = f"failed: {shorten(raised)}"
    bench.synchronize()
    return {"seconds": time.perf_counter() - start} | device_memory(bench) | found, error


def device_memory(bench: Bench) -> Figures:
    """Return the memory of the GPU that is in use, by all processes."""
    if not bench.on_gpu:
        return {}
    free, total = torch.cuda.mem_get_info(bench.device)
    return {"device_gib": (total - free) / 2**30}
