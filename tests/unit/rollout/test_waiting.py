import asyncio
import threading

import pytest

from rl_vlm.rollout.waiting import run, watched


def test_a_watch_that_fails_ends_the_request():
    cancelled = threading.Event()

    async def request() -> None:
        try:
            await asyncio.sleep(60)
        finally:
            cancelled.set()

    async def watch() -> None:
        raise ValueError("not well")

    with pytest.raises(ValueError, match="not well"):
        run(watched(request(), watch, seconds=0.01))
    assert cancelled.is_set()
