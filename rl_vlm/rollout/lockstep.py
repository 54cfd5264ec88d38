"""Equal forwards on all ranks while each samples its own completions.

If weights are gathered layer by layer, every forward is a series of all-gathers that all ranks join:

    rank 0   vision, prefill   decode   decode   decode
    rank 1   vision, prefill   decode   idle     idle
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rl_vlm.distributed.ranks import Ranks
from rl_vlm.distributed.signals import stop
from rl_vlm.errors import RLVLMError, Stopped


class Lockstep:
    """Runs forwards on all ranks together. In each forward, all ranks call the vision tower equally often."""

    def __init__(self, ranks: Ranks, idle_vision: Callable[[int], object], idle_forward: Callable[[], object]) -> None:
        """`idle_vision(n)` calls the vision tower n times without effect, and `idle_forward` the language model."""
        self.ranks = ranks
        self.idle_vision = idle_vision
        self.idle_forward = idle_forward
        self.in_forward = False

    @contextmanager
    def forward(self, num_vision_calls: int) -> Iterator[None]:
        """Run a forward with this many vision calls in this context, together with all ranks.

        Idle vision calls come first, so that all ranks make as many as the rank with the most. Raises Stopped if any
        rank is asked to stop.
        """
        _, most_calls, signum = self.ranks.max([1, num_vision_calls, stop.signum or 0])
        if signum:
            raise Stopped(signum)
        self.in_forward = True  # stays True after an error
        if most_calls > num_vision_calls:
            self.idle_vision(most_calls - num_vision_calls)
        try:
            yield
        except RLVLMError as error:  # ranks cannot agree on it: the others are in the forward
            raise RuntimeError(f"{error} This process ends, since the others are in the same forward.") from error
        self.in_forward = False

    @contextmanager
    def open(self) -> Iterator[None]:
        """Open the context for forwards on all ranks. It closes when all ranks have finished their forwards.

        After an error within a forward it closes at once. The other ranks are in the middle of the same forward, and
        end when this process does.
        """
        try:
            yield
        finally:
            if not self.in_forward:
                self.wait_for_all()

    def wait_for_all(self) -> None:
        """Run idle forwards until no rank needs one."""
        while True:
            any_runs, num_vision_calls, signum = self.ranks.max([0, 0, stop.signum or 0])
            if not any_runs:
                return
            if signum:  # the others have not begun the forward, and stop too
                continue
            if num_vision_calls:
                self.idle_vision(num_vision_calls)
            self.idle_forward()
