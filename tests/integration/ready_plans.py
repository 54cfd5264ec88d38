"""Memory plans of the ready files, as their opening comments and `docs/configs.md` give them.

`python -m tests.integration.ready_plans [NAME …]` prints them.
"""

import re
import sys
from dataclasses import dataclass, replace
from pathlib import Path

from rl_vlm.config.load import load_config
from rl_vlm.config.schema import RunConfig
from rl_vlm.distributed.setup import setup_problems
from rl_vlm.distributed.shardings import SHARDINGS, UNSHARDED
from rl_vlm.errors import RLVLMError
from rl_vlm.plan.build import Model, inspect_model, plan_memory
from rl_vlm.plan.hardware import GIB, Hardware, parse_card
from rl_vlm.plan.packaged import packaged_config
from tests.helpers.dry_runs import CONFIGS, TINY, num_processes, opening_comment

SIZES = (24, 40, 48, 80, 96, 141)
"""Cards to consider, by the gigabytes on their labels."""
PLANNED = [
    path
    for path in CONFIGS
    if path.stem not in TINY and packaged_config(str(load_config(path).model.model_name_or_path))
]
"""Ready files whose models have a packaged config."""


@dataclass(frozen=True)
class ReadyPlan:
    """A traced ready file, and the hardware that its opening comment names."""

    config: RunConfig
    model: Model
    hardware: Hardware
    size: int
    """Gigabytes on the label of the card."""

    @staticmethod
    def of(path: Path) -> "ReadyPlan":
        comment, processes = opening_comment(path).replace("\n# ", " "), num_processes(path)
        size = re.search(r"cards? of (\d+) GB|one (\d+) GB card", comment)
        file = re.search(r"launch/accelerate/(\w+)\.yaml \S+ ", comment)
        assert size
        named = int(size[1] or size[2])
        sharding = SHARDINGS[file[1]] if file and processes > 1 else UNSHARDED
        config = load_config(path)
        hardware = replace(machines(named, processes), sharding=sharding)
        return ReadyPlan(config, inspect_model(config), hardware, named)

    @property
    def line(self) -> str:
        """The sentence of the opening comment."""
        plan = plan_memory(self.config, self.hardware, self.model)
        assert plan.fits
        each = " on each GPU" if self.hardware.num_ranks > 1 else ""
        return (
            f"Planned memory: {plan.peak.total / GIB:.1f} of {plan.available / GIB:.1f} GiB{each}, in "
            f"{plan.peak.name}, with micro-batches of {plan.micro_batch_tokens:,} tokens"
        )

    def fits(self, size: int, gpus: int) -> bool:
        """Whether the run is accepted on these cards and its plan fits."""
        hardware = replace(machines(size, gpus), sharding=self.hardware.sharding if gpus > 1 else UNSHARDED)
        try:
            setup_problems(self.config, hardware.sharding, gpus).refuse()
            return plan_memory(self.config, hardware, self.model).fits
        except RLVLMError:
            return False

    @property
    def smallest(self) -> str:
        """The fewest cards of the named size, by halving, and then the smallest size."""
        gpus = self.hardware.num_ranks
        while gpus > 1 and self.fits(self.size, gpus // 2):
            gpus //= 2
        size = next(size for size in SIZES if self.fits(size, gpus))
        return f"{gpus} × {size} GB"


def machines(size: int, gpus: int) -> Hardware:
    """Machines of up to 8 cards."""
    return Hardware(parse_card(f"{size}GB"), min(gpus, 8), max(1, gpus // 8), UNSHARDED)


if __name__ == "__main__":
    for ready in PLANNED:
        if not sys.argv[1:] or ready.stem in sys.argv[1:]:
            found = ReadyPlan.of(ready)
            print(f"{ready.stem}\n    {found.line}\n    {found.smallest}", flush=True)
