"""Videos in requests to a server: frames and their times together, so that each video of a prompt has its own times.

vLLM's own form for frames takes one set of times for all videos, from the server's settings alone. Here a loader of the
server reads both from one file in NumPy's format, without loss.
"""

from __future__ import annotations

import base64
from io import BytesIO
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from jaxtyping import UInt8

LOADER = "rl_vlm"
"""Name of the loader in vLLM."""


def video_url(frames: UInt8[np.ndarray, "frames height width 3"], metadata: dict[str, Any]) -> str:
    """Return a video as a data URL for the loader."""
    file = BytesIO()
    np.savez_compressed(file, frames=frames, **metadata)
    return f"data:video/npz;base64,{base64.b64encode(file.getvalue()).decode()}"


class SentVideos:
    """Video loader of a server."""

    @classmethod
    def load_bytes(cls, data: bytes, **settings: Any) -> tuple[UInt8[np.ndarray, "frames height width 3"], dict]:
        """Read the frames and their metadata. vLLM's settings of sampling are ignored."""
        with np.load(BytesIO(data)) as stored:
            metadata = {name: stored[name].tolist() for name in stored.files if name != "frames"}
            return stored["frames"], metadata
