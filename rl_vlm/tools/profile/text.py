"""`memory_profile.json` and `memory_profile.png`: measurements of all ranks, compared with the memory plan."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from rl_vlm.distributed.ranks import Ranks
from rl_vlm.log.directory import MEMORY_PROFILE
from rl_vlm.log.files import disk_errors
from rl_vlm.plan.auto import this_card
from rl_vlm.plan.hardware import GIB
from rl_vlm.plan.memory import Load, MemoryPlan
from rl_vlm.tools.profile.profiler import MemoryProfile
from rl_vlm.tools.profile.saved import by_kind, by_layer

NUM_LISTED = 20
"""Number of layers, and of kinds of modules, in the file."""
NUM_DRAWN = 10

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class RankProfile:
    """Measurements of one rank."""

    phases: dict[str, int]
    """Peak bytes of each stage."""
    largest_micro_batch: Load


def write_profile(profile: MemoryProfile, ranks: Ranks, directory: Path) -> None:
    """Gather the measurements of all ranks, and write them on the main process. Called by all ranks together."""
    assert profile.saved is not None
    found = ranks.gather([RankProfile(profile.stage_peaks, largest_load(profile.loads, profile.plan))])
    if not ranks.is_main:
        return
    report = {
        "device": this_card(ranks.device).name,
        "measured": profile.peaks.counter.meaning,
        "phases": compared(found, profile.plan),
        "ranks": [{"rank": rank, **asdict(one)} for rank, one in enumerate(found)],
        "layers": [kept._asdict() for kept in by_layer(profile.saved.largest)[:NUM_LISTED]],
        "kinds": [kept._asdict() for kept in by_kind(profile.saved.largest)[:NUM_LISTED]],
    }
    data, picture = (directory / name for name in MEMORY_PROFILE)
    with disk_errors(directory):
        data.write_text(json.dumps(report, indent=1) + "\n")
        draw_profile(report, picture)
    logger.info("%s; see %s", peak_line(report["phases"]), picture)


def largest_load(loads: Iterable[Load], plan: MemoryPlan | None) -> Load:
    """Return the micro-batch with the most predicted bytes, or without a plan the one with the most tokens."""

    def size(load: Load) -> int:
        return sum(replace(plan, load=load).training_parts().values()) if plan else load.tokens

    return max(loads, key=size, default=Load(0, 0))


def compared(found: Sequence[RankProfile], plan: MemoryPlan | None) -> dict[str, dict[str, Any]]:
    """Compare the bytes that ranks measured in each phase with the plan's prediction for the largest micro-batch."""
    load = largest_load((one.largest_micro_batch for one in found), plan)
    predicted = {phase.name: phase for phase in replace(plan, load=load).phases} if plan else {}
    names = dict.fromkeys([*predicted, *(name for one in found for name in one.phases)])
    return {
        name: {
            **spread({rank: one.phases[name] for rank, one in enumerate(found) if name in one.phases}),
            "predicted_bytes": predicted[name].total if name in predicted else None,
            "predicted_parts": predicted[name].parts if name in predicted else {},
        }
        for name in names
    }


def spread(by_rank: dict[int, int]) -> dict[str, Any]:
    """Return the largest and the smallest measurement with their ranks. All are None if no rank has measured."""
    most, least = (choose(by_rank, key=lambda rank: by_rank[rank], default=None) for choose in (max, min))
    return {
        "measured_bytes": by_rank.get(most) if most is not None else None,
        "measured_rank": most,
        "least_bytes": by_rank.get(least) if least is not None else None,
        "least_rank": least,
    }


def peak_line(phases: dict[str, dict[str, Any]]) -> str:
    """Name the phase with the highest peak, and its prediction."""
    measured = {name: phase for name, phase in phases.items() if phase["measured_bytes"] is not None}
    name, phase = max(measured.items(), key=lambda item: item[1]["measured_bytes"])
    predicted = phase["predicted_bytes"]
    beside = "not in the plan" if predicted is None else f"predicted {predicted / GIB:.2f}"
    rank, size = phase["measured_rank"], phase["measured_bytes"]
    return f"memory peak: {name}, {size / GIB:.2f} GiB on rank {rank}, {beside}"


def draw_profile(report: dict[str, Any], path: Path) -> None:
    """Draw measured and predicted bytes of each phase, and the kinds of modules that keep most."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(14, 6.5), layout="constrained")
    bars, modules = figure.subplots(1, 2, width_ratios=[3, 2])
    phases = report["phases"]
    places, width = range(len(phases)), 0.4
    most = [(phase["measured_bytes"] or 0) / GIB for phase in phases.values()]
    least = [(phase["least_bytes"] or 0) / GIB for phase in phases.values()]
    spreads = [[high - low for high, low in zip(most, least, strict=True)], [0.0] * len(most)]
    left, right = ([place + side * width / 2 for place in places] for side in (-1, 1))
    bars.bar(left, most, width, color="black", alpha=0.7, label="measured, down to the least of any rank", yerr=spreads)
    below = [0.0] * len(phases)
    for part in dict.fromkeys(
        part for phase in phases.values() for part, size in phase["predicted_parts"].items() if size
    ):
        sizes = [phase["predicted_parts"].get(part, 0) / GIB for phase in phases.values()]
        bars.bar(right, sizes, width, bottom=below, label=f"predicted: {part}")
        below = [low + size for low, size in zip(below, sizes, strict=True)]
    bars.set_xticks(places, [name.replace("_", "\n") for name in phases])
    bars.set(ylabel="GiB", xlabel=f"measured: {report['measured']}", title=f"peak by phase, {report['device']}")
    figure.legend(loc="outside lower center", ncols=4)
    kinds = report["kinds"][:NUM_DRAWN][::-1]
    labels = [f"{kind['name']} ({kind['num_modules']})" for kind in kinds]
    modules.barh(labels, [kind["bytes"] / 2**20 for kind in kinds])
    modules.tick_params(axis="y", labelsize="small")
    modules.set(xlabel="MiB", title="kept for the backward pass, rank 0")
    figure.savefig(path, dpi=120)
