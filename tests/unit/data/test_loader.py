"""What is built ahead, and what is refused; `tests/integration/test_loader.py` has workers."""

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from rl_vlm.config.schema import DataConfig, DataSource, RunConfig
from rl_vlm.data.loader import PromptLoader, PromptSource, upcoming_windows
from rl_vlm.data.prompts import PromptBuilder
from rl_vlm.data.sampler import PromptSampler
from rl_vlm.data.samples import Part, Rows
from rl_vlm.data.tables import ListRows
from rl_vlm.errors import ConfigError
from rl_vlm.types import Prompt, Sample

NUM_ROWS = 8


class StubBuilder(PromptBuilder):
    """In place of a processor: token ids that tell the row and the process."""

    def __init__(self, notes: Path) -> None:
        self.notes = notes

    def build(self, sample: Sample) -> Prompt:
        row = int(sample.sample_id)
        with self.notes.open("a") as file:
            file.write(f"{row} {os.getpid()}\n")
        if sample.columns.get("kill"):
            os.kill(os.getpid(), signal.SIGKILL)
        facts = [row, torch.get_num_threads(), int(torch.cuda.is_initialized()), os.getpid()]
        return Prompt(sample, torch.tensor(facts), {}, {"pixel_values": torch.full((2, 3), float(row))})

    def built(self) -> list[tuple[int, int]]:
        """Row and process of every prompt, in the order of building."""
        return [tuple(map(int, line.split())) for line in self.notes.read_text().splitlines()]  # pyright: ignore


def make_prefetcher(folder: Path, num_workers: int = 1, kill: int | None = None, **settings: Any) -> PromptLoader:
    """Of eight rows with images in `folder`, two to a window; building row `kill` kills its process."""
    table = [{"prompt": "Which?", "image": str(folder / f"{i}.png"), "kill": i == kill} for i in range(NUM_ROWS)]
    for i in range(NUM_ROWS):
        Image.new("RGB", (4, 3), (i, 0, 0)).save(folder / f"{i}.png")
    data = DataConfig(dataloader_num_workers=num_workers, **settings)
    parts = [Part(DataSource(name="rows"), ListRows(table), folder)]
    rows = Rows("rows", ListRows(table), [str(i) for i in range(NUM_ROWS)], parts, data)
    sampler = PromptSampler(NUM_ROWS, prompts_per_step=2, seed=0, shuffle=False)
    source = PromptSource(rows, list(range(NUM_ROWS)), StubBuilder(folder / "notes"))
    return PromptLoader(source, sampler, 1, data)


def step(prefetcher: PromptLoader) -> list[Prompt]:
    return prefetcher.prompts(prefetcher.sampler.next_step())


def facts(prompts: list[Prompt]) -> list[list[int]]:
    return [prompt.token_ids.tolist() for prompt in prompts]


# Ahead of the sampler


def test_upcoming_windows_are_those_that_the_sampler_will_draw():
    sampler = PromptSampler(num_rows=5, prompts_per_step=4, seed=3, rank=1, world_size=2)
    sampler.next_window(3)
    upcoming = upcoming_windows(sampler, steps=2)
    expected_cursor = sampler.cursor
    ahead = [next(upcoming) for _ in range(4)]
    assert sampler.cursor == expected_cursor
    assert ahead == [sampler.next_window(2) for _ in range(4)]
    assert len(ahead[0]) == 4


def test_without_workers_nothing_is_built_ahead(tmp_path: Path):
    prefetcher = make_prefetcher(tmp_path, num_workers=0)
    assert [[row, pid] for row, _, _, pid in facts(step(prefetcher))] == [[0, os.getpid()], [1, os.getpid()]]
    builder: Any = prefetcher.source.builder
    assert builder.built() == [(0, os.getpid()), (1, os.getpid())]
    assert prefetcher.workers is None


def test_prefetch_factor_is_windows_per_worker(tmp_path: Path):
    assert make_prefetcher(tmp_path, num_workers=2).num_ahead == 2
    assert make_prefetcher(tmp_path, num_workers=2, dataloader_prefetch_factor=3).num_ahead == 6


# What goes wrong


def test_what_cannot_be_sent_is_refused_before_the_run(tmp_path: Path):
    prefetcher = make_prefetcher(tmp_path, num_workers=0)
    builder: Any = prefetcher.source.builder
    builder.notes = lambda: None
    with pytest.raises(ConfigError, match=r"dataloader_num_workers: .* cannot be sent .*lambda.* Set it to 0"):
        PromptLoader(prefetcher.source, prefetcher.sampler, 1, DataConfig(dataloader_num_workers=1))
    PromptLoader(prefetcher.source, prefetcher.sampler, 1, DataConfig())


def test_a_prefetch_factor_without_workers_is_refused():
    given = {"model": {"model_name_or_path": "tiny"}, "data": {"dataloader_prefetch_factor": 2}}
    with pytest.raises(ValueError, match="`dataloader_prefetch_factor` has no effect without `dataloader_num_workers`"):
        RunConfig.model_validate(given)
    given["data"]["dataloader_num_workers"] = 1
    RunConfig.model_validate(given)
