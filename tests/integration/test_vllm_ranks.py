"""vLLM in each of two processes: a model per rank, or one over both."""

from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

from rl_vlm.errors import ConfigError
from rl_vlm.log.metrics import MetricsLog
from rl_vlm.rollout.vllm.build import beside_ranks
from tests.helpers import tiny_run
from tests.helpers.builders import sharpen
from tests.helpers.two_processes import train_on_two_processes
from tests.tiny.build import build_tiny

pytestmark = pytest.mark.skipif(find_spec("vllm") is None, reason="needs vllm")


SHARED_MEMORY = Path("/dev/shm")


@pytest.fixture
def memory_of_another_run() -> Iterator[list[Path]]:
    """Shared memory with the names that vLLM gives its own in every run that a launcher starts."""
    paths = [SHARED_MEMORY / f"-tp:0-[0-1]-cpushm_{rank}" for rank in range(2)]
    for path in paths:
        path.touch()
    yield paths
    for path in paths:
        path.unlink(missing_ok=True)


@pytest.mark.parametrize("tensor_parallel_size", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_two_ranks_sample_from_the_policys_weights(
    tensor_parallel_size: int, memory_of_another_run: list[Path], tmp_path: Path
) -> None:
    config = tiny_run.make_config(
        sharpen(build_tiny("qwen2_5_vl", tmp_path / "checkpoint", hidden_size=128)),  # four heads
        tmp_path / "run",
        engine="vllm",
        vllm_tensor_parallel_size=tensor_parallel_size,
        vllm_max_model_length=256,
        max_num_seqs=16,
        max_steps=3,
        eval_dataset_name=tiny_run.HELD_OUT_ROWS,
    )
    train_on_two_processes(config, tmp_path / "run.yaml")
    assert set(SHARED_MEMORY.glob("*cpushm*")) <= set(memory_of_another_run)
    lines = MetricsLog(tmp_path / "run" / "metrics.jsonl").read()
    assert [line["step"] for line in lines] == [0, 1, 2, 3]
    assert all(line["sampling/sampling_logp_difference/max"] <= 1e-3 for line in lines[1:])
    assert [line["sampling/policy_version_lag"] for line in lines[1:]] == [0, 0, 0]
    for rows in tiny_run.completions(tmp_path / "run").values():
        assert len(rows) == 2 * 4 and len({row["sample_id"] for row in rows}) == 2  # each rank its own prompt


def test_ranks_that_do_not_divide_into_models_are_refused(tmp_path: Path) -> None:
    config = tiny_run.make_config("model", tmp_path, engine="vllm", vllm_tensor_parallel_size=2)
    with pytest.raises(ConfigError, match=r"vllm_tensor_parallel_size 2 does not divide the run's 3 processes"):
        beside_ranks(config, 3)
