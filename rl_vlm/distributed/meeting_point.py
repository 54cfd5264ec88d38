"""The launcher's store, where the processes of a run meet."""

from __future__ import annotations

import os
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

from torch.distributed import (
    PrefixStore,  # pyright: ignore[reportPrivateImportUsage]
    TCPStore,  # pyright: ignore[reportPrivateImportUsage]
    register_rendezvous_handler,  # pyright: ignore[reportPrivateImportUsage]
)

RESTARTED = "rl-vlm-restarted"


def connect(prefix: str, timeout: timedelta) -> Any:
    """Connect to the launcher's store. Each start of the processes has its own keys.

    If the launcher keeps no store, rank 0 does, and its process group shares it.
    """
    names = ("TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT")
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    is_kept_here = os.environ["RANK"] == "0" and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    store = TCPStore(address, port, None, is_kept_here, timeout, wait_for_workers=False, multi_tenant=True)
    return PrefixStore("/".join(["rl_vlm", *(os.environ.get(name, "") for name in names), prefix]), store)


def init_method() -> str | None:
    """Return torch's `init_method`, or None for its default.

    With `--max_restarts`, the static rendezvous of `accelerate launch` keeps its store. After a restart, processes
    would find the addresses of ended processes there, and try to connect to them.
    """
    has_restarted = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0"
    return f"{RESTARTED}://" if has_restarted and "TORCHELASTIC_USE_AGENT_STORE" in os.environ else None


def _meet_again(url: str, timeout: timedelta = timedelta(minutes=30), **_: Any) -> Iterator[tuple[Any, int, int]]:
    """Yield the store, the rank and the number of processes, as torch expects of a rendezvous."""
    yield connect("process_group", timeout), int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])


register_rendezvous_handler(RESTARTED, _meet_again)
