"""NaN at 104 random places of a run on two processes: no weight changes in that step, and the log names each."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rl_vlm.config.describe import to_yaml
from tests.helpers.sharded_runs import launcher_file
from tests.helpers.tiny_run import make_config, metric_lines
from tests.helpers.two_processes import launch

NUM_STEPS = 260


def injected(run: Path, rank: int) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / f"injected_{rank}.jsonl").read_text().splitlines()]


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["ddp", "fsdp2"])
def test_no_weight_changes_in_a_step_with_a_nan(engine, tiny_checkpoint, tmp_path):
    run, config = tmp_path / "run", tmp_path / "run.yaml"
    settings = {"max_steps": NUM_STEPS, "save_steps": 0, "prompts_per_step": 4, "micro_batch_tokens": 95,
                "reward_funcs": ["tests.integration.injected_nan:token_sum_or_nan"], "learning_rate": 1e-3}  # fmt: skip
    config.write_text(to_yaml(make_config(tiny_checkpoint, run, **settings)))
    file = str(launcher_file(engine, tmp_path))
    done = launch("--config_file", file, "-m", "tests.integration.injected_nan", str(config), timeout=900)
    assert done.returncode == 0, done.stderr[-5000:]
    skipped, returned = [], []
    for line, *ranks in zip(metric_lines(run), injected(run, 0), injected(run, 1), strict=True):
        step, kind = line["step"], ranks[0]["kind"]
        assert all(rank["step"] == step and rank["is_finite"] for rank in ranks)
        is_nan = any(rank["is_done"] for rank in ranks)
        is_skipped = is_nan and kind != "reward"
        assert line["skipped_updates/nonfinite"] == float(is_skipped), (step, kind)
        assert [rank["changed"] for rank in ranks] == [not is_skipped] * 2, (step, kind)
        if is_skipped:
            skipped.append(kind)
            assert f"loss or gradient is not finite; step {step} was skipped" in done.stderr
            assert list(run.glob(f"nonfinite-step-{step}-rank-*.pt"))
        elif is_nan:
            returned.append(kind)
            assert line["reward_faults/token_sum_or_nan/nan"] == 1
    print({kind: skipped.count(kind) for kind in set(skipped)}, len(returned))
    assert len(skipped) >= 100 and len(returned) >= 10
