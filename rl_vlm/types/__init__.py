"""The data types of the system, in the order in which a batch passes through them.

    Sample ─ prompts ─► Prompt ─ generation ─► Group ─ reward, advantages ─► ScoredGroup ─ batching ─► MicroBatch

Example: 2 prompts, G = 3 completions each, one group split in two by the token budget:

    groups        A: [a0 a1 a2]        B: [b0 b1 b2]
    micro-batch 0 SubGroup(A, members=[0, 1, 2]), SubGroup(B, members=[0])
    micro-batch 1 SubGroup(B, members=[1, 2])

Suffixes of ragged or padded values: P prompts, G completions of a group, N completions of a micro-batch,
T tokens of a completion, F reward functions.
"""

from rl_vlm.types.completions import (
    NO_TOKENS,
    Completion,
    Context,
    FinishReason,
    Group,
    Observation,
    Path,
    Rendered,
    RolloutRequest,
    Sampling,
    ServedCompletion,
    ToolCall,
    ToolResult,
    Turn,
    concatenate_images,
    has_video,
    num_tokens,
    rendered_of,
)
from rl_vlm.types.media import MediumRead, Video, is_clip
from rl_vlm.types.prompts import Prompt, Sample, VideoFormat, digest_of
from rl_vlm.types.tensors import length_mask, pad_rows, pad_split, synchronize, to_device, to_host
from rl_vlm.types.training import (
    FaultKey,
    Forward,
    MicroBatch,
    PolicyOutput,
    Progress,
    RewardTable,
    ScoredGroup,
    Sharing,
    SubGroup,
    TowerBackward,
    TrainerState,
)

__all__ = [
    "NO_TOKENS", "Completion", "Context", "FaultKey", "FinishReason", "Forward", "Group", "MediumRead", "MicroBatch",
    "Observation", "Path", "PolicyOutput", "Progress", "Prompt", "Rendered", "RewardTable", "RolloutRequest", "Sample",
    "Sampling", "ScoredGroup", "ServedCompletion", "Sharing", "SubGroup", "ToolCall", "ToolResult", "TowerBackward",
    "TrainerState", "Turn", "Video", "VideoFormat", "concatenate_images", "digest_of", "has_video", "is_clip",
    "length_mask", "num_tokens", "pad_rows", "pad_split", "rendered_of", "synchronize", "to_device", "to_host",
]  # fmt: skip
