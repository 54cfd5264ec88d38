"""States of groups, for checkpoints and for moves between ranks.

Pixels are large, so no state has them. They are built again when a state is read:

    the group's prompt    from the dataset row
    a member's own prompt from its messages, and the images and clips that its environment has shown
    an observation        from its encoded images and clips; its tokens are in the state

A state has a digest of the pixels of a row, so that other pixels are an error. No state has an environment's instance.
"""

from __future__ import annotations

from dataclasses import asdict, replace
from itertools import zip_longest
from typing import Any, Protocol, runtime_checkable

from rewards.contract import Fault
from rl_vlm.data.images import decode_image, png_bytes
from rl_vlm.data.prompts import SampleRenderer
from rl_vlm.data.sampler import Draw
from rl_vlm.data.video.shown import decode_medium
from rl_vlm.errors import CheckpointError
from rl_vlm.types import (
    Completion,
    Context,
    Group,
    MediumRead,
    Observation,
    Prompt,
    Sample,
    ToolCall,
    ToolResult,
    Turn,
    Video,
)

State = dict[str, Any]
"""Tensors, bytes and plain values, which torch loads without running code."""
OF_VIDEOS = ("videos", "frames_of")
"""Fields of a `Sample` that hold videos."""


@runtime_checkable
class Builder(Protocol):
    """Rebuilds the parts that states leave out. `PromptSource` is one."""

    @property
    def builder(self) -> SampleRenderer:
        """Return the builder of prompts of samples, and of the inputs of images and videos."""
        ...

    def build(self, draw: Draw) -> Prompt:
        """Build the prompt of a dataset row."""
        ...


def prompt_state(draw: Draw, prompt: Prompt) -> State:
    """Return the draw of a prompt, and the pixels that were read of the images and videos of its row."""
    return {"draw": tuple(draw), "reads": [tuple(read) for read in prompt.sample.reads]}


def prompt_from_state(state: State, builder: Builder) -> tuple[Draw, Prompt]:
    """Build a prompt again from `prompt_state`.

    Raises CheckpointError if an image or a video has other pixels now. Checkpoints from before digests have none.
    """
    draw = Draw(*state["draw"])
    prompt = builder.build(draw)
    saved = [MediumRead(*read) for read in state.get("reads", prompt.sample.reads)]
    for before, now in zip_longest(saved, prompt.sample.reads):
        if before is None or now is None or not before.is_same(now):
            kind = next(read.kind for read in (before, now) if read)
            raise CheckpointError(
                f"{prompt.name} has another {kind} than when its completions were sampled. Then: {before or 'none'}. "
                f"Now: {now or 'none'}. Restore the {kind}, and the version of the software that reads it, or resume "
                "from an earlier checkpoint."
            )
    return draw, prompt


def group_state(group: Group) -> State:
    """Return the state of a group. It holds each observation and each own prompt once, however many use it."""
    starts = list(dict.fromkeys(c.start for c in group.completions if c.start is not None))
    pending = [c.pending for c in group.completions if c.pending is not None]
    seen = [observation for c in group.completions for observation in c.observations]
    edited = [observation for c in group.completions for observation in c.edited]
    observations = list(dict.fromkeys([*seen, *edited, *pending]))
    return {
        "group_id": group.group_id,
        "policy_version": group.policy_version,
        "starts": [sample_state(start.sample, group.prompt.sample) for start in starts],
        "observations": [observation_state(observation) for observation in observations],
        "completions": [completion_state(c, starts, observations) for c in group.completions],
    }


def group_from_state(state: State, prompt: Prompt, builder: Builder) -> Group:
    """Restore a group from `group_state` and the prompt of its row."""
    starts = [builder.builder.build(sample_from_state(start, prompt.sample)) for start in state.get("starts", ())]
    observations = [observation_from_state(one, builder) for one in state.get("observations", ())]
    completions = [completion_from_state(one, starts, observations) for one in state["completions"]]
    return Group(state["group_id"], prompt, completions, state["policy_version"])


def sample_state(sample: Sample, row: Sample) -> State:
    """Return the fields that an environment's `reset` changes in the sample of a row.

    The images are files, as they are sent to servers. Videos are files too, or their numbers if they are the row's.
    """
    files = [sample.encoded_images.get(i) or png_bytes(image) for i, image in enumerate(sample.images)]
    numbers = {video: i for i, video in enumerate(row.all_videos)}
    names = ("messages", "prompt", "image_files", "frame_starts")
    return {
        "images": files,
        "encoded": sorted(sample.encoded_images),
        **{
            name: [numbers[video] if video in numbers else video.encoded() for video in getattr(sample, name)]
            for name in OF_VIDEOS
        },
        **{name: getattr(sample, name) for name in names},
    }


def sample_from_state(state: State, row: Sample) -> Sample:
    """Restore a sample from `sample_state` and the sample of its row, which has its columns."""
    files, fields = state["images"], {name: value for name, value in state.items() if name != "encoded"}
    encoded = {i: files[i] for i in state["encoded"]}
    videos = {
        name: [row.all_videos[each] if isinstance(each, int) else Video.decoded(each) for each in state[name]]
        for name in OF_VIDEOS
        if name in state  # checkpoints from before clips lack them
    }
    return replace(row, **fields | videos | {"images": list(map(decode_image, files)), "encoded_images": encoded})


def observation_state(observation: Observation) -> State:
    """Return an observation without its pixels."""
    names = ("name", "token_ids", "token_inputs", "images", "unexpanded_ids")
    return {name: getattr(observation, name) for name in names}


def observation_from_state(state: State, builder: Builder) -> Observation:
    """Restore `observation_state`."""
    inputs = builder.builder.media_inputs([decode_medium(file) for file in state["images"]])
    return Observation(**state, mm_inputs=inputs)


def completion_state(completion: Completion, starts: list[Prompt], observations: list[Observation]) -> State:
    """Return a completion with the places of its prompt and its observations in these lists."""
    places = {observation: i for i, observation in enumerate(observations)}
    values = {name: value for name, value in vars(completion).items() if name != "environment"}
    return values | {
        "contexts": [
            [part if isinstance(part, int) else [places[part]] for part in context.parts]
            for context in completion.contexts
        ],
        "pending": None if completion.pending is None else places[completion.pending],
        "edited": [places[observation] for observation in completion.edited],
        "start": None if completion.start is None else starts.index(completion.start),
        "turns": [asdict(turn) for turn in completion.turns],
        "fault": completion.fault and str(completion.fault),
    }


def completion_from_state(state: State, starts: list[Prompt], observations: list[Observation]) -> Completion:
    """Restore `completion_state`. Checkpoints from before trajectories lack their fields."""
    pending, start, fault = state.get("pending"), state.get("start"), state.get("fault")
    contexts = [
        Context(tuple(part if isinstance(part, int) else observations[part[0]] for part in parts))
        for parts in state.get("contexts", ())
    ]
    restored = {
        "contexts": tuple(contexts),
        "pending": None if pending is None else observations[pending],
        "edited": tuple(observations[place] for place in state.get("edited", ())),
        "start": None if start is None else starts[start],
        "turns": tuple(map(turn_from_state, state.get("turns", ()))),
        "fault": fault and Fault.read(fault),
    }
    return Completion(**state | restored)


def turn_from_state(state: State) -> Turn:
    """Restore a turn that `dataclasses.asdict` took apart."""
    calls = tuple(ToolCall(**call) for call in state["calls"])
    return Turn(**state | {"calls": calls, "results": tuple(ToolResult(**result) for result in state["results"])})
