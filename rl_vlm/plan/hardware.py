"""Graphics cards: the memory that each offers to a process, and its speed.

A size such as `80GB` names a class of cards. A card's memory is its `torch.cuda.get_device_properties().total_memory`,
which is less than the label says. The figures come from "total capacity of … GiB" in public out-of-memory reports,
rounded down:

    24 GB  RTX 3090 and 4090 23.61 to 23.70, A10 and L4 (ECC) 22.03 to 22.15
    32 GB  RTX 5090 31.36 to 31.37
    40 GB  A100 39.38 to 39.56
    48 GB  L40S, A40 and RTX A6000 (ECC) 44.34 to 44.47
    80 GB  A100 and H100 79.14 to 79.25
    94 GB  H100 NVL 93.02 to 93.10
    96 GB  GH200 94.50, RTX PRO 6000 94.96 to 94.98
    141 GB H200 139.72 to 139.81
    180 GB B200 178.35 to 178.36

Speeds are the dense bfloat16 peaks and links of NVIDIA's data sheets. Training does not reach these peaks.
"""

import re
from dataclasses import dataclass

from rl_vlm.distributed.shardings import Sharding
from rl_vlm.errors import ConfigError, did_you_mean

GIB = 2**30

CUDA_CONTEXT = round(0.6 * GIB)
"""Bytes of the CUDA context of a process. Public reports: 471 MiB on an RTX 4090, 612 to 614 MiB on A100 and H200."""

NCCL_BUFFERS = GIB // 2
"""Bytes of a rank's NCCL buffers if there are several ranks, an assumption: 32 channels of `NCCL_BUFFSIZE` (4 MiB) to
send and to receive, doubled for NCCL's other protocols."""

FRAGMENTATION_RESERVE = 0.05
"""Fraction of a card to leave free, an assumption. Out-of-memory reports show 0.5% to 8% of a card "reserved by PyTorch
but unallocated" in most cases."""


@dataclass(frozen=True)
class Card:
    """One GPU. A speed is None if it is not known."""

    name: str
    memory: int
    """All bytes that the card offers, CUDA context included."""
    flops: float | None = None
    """Dense bfloat16 peak, in operations per second."""
    link: float | None = None
    """Bytes per second from one card to the next, in one direction: NVLink if the card has it, else PCIe."""

    def budget(self, num_ranks: int = 1) -> int:
        """Return the bytes for weights, activations and caches: all but context, NCCL's buffers and the reserve."""
        fixed = CUDA_CONTEXT + (NCCL_BUFFERS if num_ranks > 1 else 0)
        return max(0, int(self.memory * (1 - FRAGMENTATION_RESERVE)) - fixed)


@dataclass(frozen=True)
class Hardware:
    """The machines of a run."""

    card: Card
    gpus: int
    """GPUs of each node."""
    nodes: int
    sharding: Sharding

    @property
    def num_ranks(self) -> int:
        return self.gpus * self.nodes


def _card(name: str, gib: float, tflops: int, link_gbytes: int) -> Card:
    return Card(name, int(gib * GIB), tflops * 1e12, link_gbytes * 1e9)


PCIE4, PCIE5 = 32, 64

CARDS = {
    card.name: card
    for card in (
        _card("rtx-3090", 23.6, 71, PCIE4),
        _card("rtx-4090", 23.6, 165, PCIE4),
        _card("a10", 22.0, 125, PCIE4),
        _card("l4", 22.0, 121, PCIE4),
        _card("rtx-5090", 31.3, 209, PCIE5),
        _card("a100-40gb", 39.3, 312, 300),
        _card("a40", 44.3, 150, PCIE4),
        _card("rtx-a6000", 44.3, 155, PCIE4),
        _card("l40s", 44.3, 362, PCIE4),
        _card("a100-80gb", 79.1, 312, 300),
        _card("h100", 79.1, 989, 450),
        _card("h100-pcie", 79.1, 756, 300),
        _card("h100-nvl", 93.0, 835, 300),
        _card("gh200", 94.5, 989, 450),
        _card("rtx-pro-6000", 94.9, 503, PCIE5),
        _card("h200", 139.7, 989, 450),
        _card("b200", 178.3, 2250, 900),
    )
}

CARD_OF_SIZE = {
    24: "rtx-4090", 32: "rtx-5090", 40: "a100-40gb", 48: "l40s", 80: "h100", 94: "h100-nvl", 96: "rtx-pro-6000",
    141: "h200", 180: "b200", 192: "b200",
}  # fmt: skip
"""The card to assume for a size in gigabytes. B200 is sold under two sizes."""


def parse_card(text: str) -> Card:
    """Return the card that `--gpu-memory` names.

    `h100` is the name of a card, and `NVIDIA GeForce RTX 4090`, `rtx4090` and `4090` name the same card. `80GB` or `80`
    stands for the card of that size. Any other size, and any size in `GiB`, is the memory in GiB. Raises ConfigError
    with the known cards for any other text.
    """
    name = text.strip().lower().replace(" ", "-").replace("_", "-")
    if card := next((card for card in CARDS.values() if short(card.name) == short(name)), None):
        return card
    size = re.fullmatch(r"(\d{1,6}(?:\.\d{1,6})?)-?(gib|gb|g|)", name, re.ASCII)
    if size is None or float(size[1]) == 0:
        raise ConfigError(
            f"`--gpu-memory` {text!r} is neither a size nor a known card{did_you_mean(name, CARDS)}; give a size such "
            f"as 80GB (the memory on the card's label) or 79.1GiB (what it offers), or one of: {', '.join(CARDS)}"
        )
    gigabytes = float(size[1])
    if size[2] != "gib" and gigabytes in CARD_OF_SIZE:
        return CARDS[CARD_OF_SIZE[int(gigabytes)]]
    return Card(f"{size[1]}GiB", int(gigabytes * GIB))


def short(name: str) -> str:
    """Return the name of a card without hyphens and the names of brands before it."""
    return re.sub("^(nvidia|geforce|rtx)+", "", name.replace("-", ""))
