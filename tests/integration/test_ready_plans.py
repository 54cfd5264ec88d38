"""Plans of the ready files: their opening comments and docs/configs.md say what is planned today."""

import re
from pathlib import Path

import pytest

from tests.helpers.dry_runs import ROOT, opening_comment
from tests.integration.ready_plans import PLANNED, SIZES, ReadyPlan

TABLE = (ROOT / "docs/configs.md").read_text()


@pytest.mark.slow
@pytest.mark.parametrize("path", PLANNED, ids=lambda path: path.stem)
def test_a_ready_file_says_what_is_planned_and_the_smallest_hardware(path: Path) -> None:
    """After a wanted change of a plan: `python -m tests.integration.ready_plans`, and write its lines."""
    found = ReadyPlan.of(path)
    assert found.line in opening_comment(path).replace("\n# ", " ")
    row = next(line for line in TABLE.splitlines() if f"`{path.name}`" in line)
    *_, hardware, planned, smallest = (cell.strip() for cell in row.strip("|").split("|"))
    assert hardware == f"{found.hardware.num_ranks} × {found.size} GB"
    assert f"Planned memory: {planned} GiB" in found.line
    named = re.fullmatch(r"(\d+) × (\d+) GB", smallest)
    assert named
    gpus, size = int(named[1]), int(named[2])
    assert found.fits(size, gpus)
    assert not (gpus > 1 and found.fits(size, gpus // 2))
    assert not any(found.fits(smaller, gpus) for smaller in SIZES if smaller < size)
