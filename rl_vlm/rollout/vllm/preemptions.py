"""Preemptions: if vLLM's KV cache is full, it evicts sequences and computes them again later."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

from rl_vlm.errors import RolloutError
from rl_vlm.rollout.vllm.client import VLLMClient

METRIC = "sampling/preemptions"
COUNTER = "vllm:num_preemptions"
"""Name of vLLM's counter. In Prometheus's text format it ends with `_total`."""

logger = logging.getLogger(__name__)


class Preemptions:
    """Counts preemptions with vLLM's counters, which start with the engine."""

    def __init__(self, totals: Mapping[str, int]) -> None:
        """`totals` are the counters at the start, by engine."""
        self.last = dict(totals)
        self.has_warned = False

    def new(self, totals: Mapping[str, int]) -> int:
        """Return the preemptions since the last call, and log a warning if they are the first.

        If an engine is restarted, its counter begins at 0 again.
        """
        before = {name: self.last.get(name, 0) for name in totals}
        count = sum(total - before[name] if total >= before[name] else total for name, total in totals.items())
        self.last |= totals
        if count and not self.has_warned:
            logger.warning(
                "vLLM's KV cache is full: vLLM evicted sequences %d times in this rollout and computed them again, "
                "which takes time. Raise vllm.vllm_gpu_memory_utilization, or lower rollout.max_num_seqs. The metric "
                "%s counts later ones.", count, METRIC,
            )  # fmt: skip
            self.has_warned = True
        return count


def total_in_process(llm: Any) -> int:
    """Return the counter of a `vllm.LLM`."""
    return sum(metric.value for metric in llm.get_metrics() if metric.name == COUNTER)


def totals_of_servers(clients: Sequence[VLLMClient]) -> dict[str, int]:
    """Return the counters of servers by URL. Servers that fail to answer are left out."""
    totals = {}
    for client in clients:
        try:
            text = client.get("/metrics")
        except RolloutError:  # a failed count does not make a server lost
            continue
        if isinstance(text, str) and COUNTER in text:
            totals[client.url] = total_in_text(text)
    return totals


def total_in_text(text: str) -> int:
    """Return the sum of the counter over all engines of a server, from Prometheus's text format."""
    lines = [line for line in text.splitlines() if line.startswith((f"{COUNTER}_total ", f"{COUNTER}_total{{"))]
    return int(sum(float(line.rpartition(" ")[2]) for line in lines))
