"""The rollout engine on tiny random models, against `model.generate` and fresh full forwards."""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForImageTextToText, AutoProcessor

from rl_vlm.model.families import family_of
from rl_vlm.model.policy import Policy
from rl_vlm.model.shared_prefix import enable_shared_rows
from rl_vlm.model.vision import VisionEncoder
from rl_vlm.rollout import hf
from rl_vlm.rollout.hf import HFEngine
from rl_vlm.rollout.sampling import EndOfTurn
from rl_vlm.tiny.qwen import QWEN
from rl_vlm.types import (
    NO_TOKENS,
    Forward,
    Group,
    MicroBatch,
    Prompt,
    RolloutRequest,
    Sampling,
    ScoredGroup,
    SubGroup,
    pad_rows,
)
from tests.helpers.builders import QUESTION, make_prompt, noise_image, sharp_checkpoint
from tests.helpers.stock import generate_with_transformers, stock_logprobs

NO_STOP = [399]
MANY_STOPS = list(range(40, 80))
"""A tenth of the vocabulary: completions of a random model end after ten tokens on average."""


PICTURES = {
    "one": [noise_image(32, 24, seed=1)],
    "two": [noise_image(48, 16, seed=2), noise_image(16, 64, seed=3)],
    "text": [],
    "other": [noise_image(32, 24, seed=4)],
}


def load(directory: Path, family: str) -> tuple[Any, dict[str, Prompt], Any]:
    """A model with attention that is not uniform, one prompt per entry of PICTURES, and the tokenizer."""
    checkpoint = sharp_checkpoint(family, directory)
    model: Any = AutoModelForImageTextToText.from_pretrained(checkpoint, dtype=torch.float32)
    enable_shared_rows(model)
    with torch.no_grad():
        # Tied to the input embeddings or not: logits that differ enough for greedy decoding to mean something.
        model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight * 4)
    prompts = {name: make_prompt(checkpoint, images, text=f"{QUESTION} {name}") for name, images in PICTURES.items()}
    return model, prompts, AutoProcessor.from_pretrained(checkpoint).tokenizer


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, dict[str, Prompt], Any]:
    return load(tmp_path_factory.mktemp("tiny"), "qwen2_5_vl")


@pytest.fixture
def model(tiny) -> Any:
    tiny[0].model.rope_deltas = None
    return tiny[0].eval()


@pytest.fixture
def prompts(tiny) -> dict[str, Prompt]:
    return tiny[1]


@pytest.fixture
def engine(tiny, model) -> HFEngine:
    return make_engine(model, tiny[2])


def make_engine(model: Any, tokenizer: Any, stops: list[int] = NO_STOP, max_num_seqs: int = 64) -> HFEngine:
    return HFEngine(VisionEncoder(model, family_of(model.config)), tokenizer, stops, max_num_seqs)


def make_sampling(
    num_generations: int = 3, max_completion_length: int = 12, temperature: float = 1.0, **settings
) -> Sampling:
    return Sampling(num_generations, max_completion_length, temperature, seed=5, **settings)


def make_requests(prompts: dict[str, Prompt], *names: str) -> list[RolloutRequest]:
    return [RolloutRequest(f"step-0/{name}", prompts[name]) for name in names or prompts]


def token_ids(groups: list[Group]) -> dict[str, list[list[int]]]:
    return {group.group_id: [c.token_ids.tolist() for c in group.completions] for group in groups}


def unscored(group: Group) -> SubGroup:
    """A group as the policy takes it, its rewards without meaning."""
    num = len(group.completions)
    zeros, valid = torch.zeros(num), torch.ones(num, dtype=torch.bool)
    return SubGroup(ScoredGroup(group, zeros[:, None], zeros, zeros, valid, has_variance=False), list(range(num)))


@contextmanager
def recorded(module: torch.nn.Module) -> Iterator[list[dict[str, Any]]]:
    """Keyword arguments of each forward of a module."""
    calls: list[dict[str, Any]] = []
    hook = module.register_forward_pre_hook(lambda _, args, kwargs: calls.append(kwargs), with_kwargs=True)
    try:
        yield calls
    finally:
        hook.remove()


@pytest.mark.parametrize("family", sorted(QWEN))
def test_greedy_is_that_of_transformers_in_a_mixed_batch(family, tmp_path):
    model, prompts, tokenizer = load(tmp_path, family)
    model.eval()
    banned = family_of(model.config).banned_token_ids(model.config)
    for stops in (NO_STOP, MANY_STOPS):
        settings = {"banned": banned, "stops": stops, "max_new_tokens": 12}
        expected = {f"step-0/{n}": [generate_with_transformers(model, p, **settings)] for n, p in prompts.items()}
        engine = make_engine(model, tokenizer, stops)
        assert token_ids(engine.generate(make_requests(prompts), make_sampling(1, temperature=0.0))) == expected
    assert len({tuple(rows[0]) for rows in expected.values()}) > 1


@pytest.mark.parametrize("temperature", [0.7, 1.5])
def test_generator_logprobs_are_those_of_a_full_forward(engine, prompts, temperature):
    groups = engine.generate(make_requests(prompts), make_sampling(temperature=temperature, top_k=20, top_p=0.9))
    for group in groups:
        for completion in group.completions:
            expected = stock_logprobs(
                engine.model, engine.vision.family, group.prompt, completion,
                banned=engine.banned_token_ids, temperature=temperature,
            )  # fmt: skip
            assert (completion.generator_logprobs - expected).abs().max() < 1e-5


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 0.1)])
def test_generator_logprobs_are_those_of_the_policy(tiny, model, prompts, dtype, tolerance):
    policy = Policy(model, family_of(model.config), temperature=1.3, compute_dtype=dtype)
    engine = HFEngine.for_policy(policy, tiny[2], max_num_seqs=64)
    dtypes = set()
    hook = model.lm_head.register_forward_hook(lambda _module, _args, logits: dtypes.add(logits.dtype))
    groups = engine.generate(make_requests(prompts), make_sampling(temperature=1.3))
    hook.remove()
    assert dtypes == {dtype}
    with torch.no_grad():
        scores = policy(Forward(MicroBatch([unscored(group) for group in groups], shared=False)))
    generated = pad_rows([c.generator_logprobs for group in groups for c in group.completions])
    assert (generated - scores.logprobs_NT).abs().max() < tolerance


def test_completions_do_not_depend_on_what_else_is_sampled(tiny, model, prompts, monkeypatch):
    sampling = make_sampling(num_generations=4, max_completion_length=12, temperature=1.3)
    requests = make_requests(prompts)
    whole = make_engine(model, tiny[2], MANY_STOPS).generate(requests, sampling)
    assert {c.finish_reason for group in whole for c in group.completions} == {"stop", "length"}
    expected = token_ids(whole)

    for max_num_seqs in (1, 3, 4, 9):
        assert token_ids(make_engine(model, tiny[2], MANY_STOPS, max_num_seqs).generate(requests, sampling)) == expected
    engine = make_engine(model, tiny[2], MANY_STOPS)
    assert token_ids(engine.generate(requests[::-1], sampling)) == expected
    alone = [engine.generate([request], sampling)[0] for request in requests]
    assert token_ids(alone) == expected
    for fraction in (0.0, 2.0):  # finished completions leave at once, or never
        monkeypatch.setattr(hf, "COMPACT_FRACTION", fraction)
        assert token_ids(engine.generate(requests, sampling)) == expected


def test_resumed_completions_have_the_logprobs_of_a_full_forward(engine, prompts):
    requests, found = make_requests(prompts), []
    for _ in range(3):
        groups = engine.generate(requests, make_sampling(max_completion_length=5, max_rollout_tokens=2))
        found.append({(len(c.token_ids), c.finish_reason) for group in groups for c in group.completions})
        requests = [RolloutRequest(group.group_id, group.prompt, group) for group in groups]
    assert found == [{(2, "paused")}, {(4, "paused")}, {(5, "length")}]
    for group in groups:
        for completion in group.completions:
            expected = stock_logprobs(
                engine.model, engine.vision.family, group.prompt, completion, banned=engine.banned_token_ids
            )
            assert (completion.generator_logprobs - expected).abs().max() < 1e-5


class Full(HFEngine):
    """An engine with memory for four completions at once."""

    sizes: list[int]
    """Completions of each batch, whether it fits or not."""

    def generate_batch(self, requests: list[RolloutRequest], sampling: Sampling) -> list[Group]:
        self.sizes.append(len(requests) * sampling.num_generations)
        if self.sizes[-1] > 4:
            raise torch.OutOfMemoryError("Tried to allocate 1 byte")
        return super().generate_batch(requests, sampling)


def test_half_of_the_completions_that_ran_out_of_memory_are_generated_at_once(tiny, model, prompts):
    requests, sampling = make_requests(prompts), make_sampling(max_completion_length=2)
    expected = token_ids(make_engine(model, tiny[2]).generate(requests, sampling))
    engine = Full(VisionEncoder(model, family_of(model.config)), tiny[2], NO_STOP, max_num_seqs=64)
    engine.sizes = []
    assert token_ids(engine.generate(requests, sampling)) == expected
    assert engine.sizes == [12, 6, 3, 3, 3, 3]  # four prompts of three: 12 of at most 64, then of at most 6 and 3
    assert (engine.max_num_seqs, engine.counters) == (3, {"out_of_memory/rollout": 2})


class Waits(TorchDispatchMode):
    """Counts the operators whose result a host reads from a device, by name."""

    def __init__(self) -> None:
        super().__init__()
        self.found: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        aten = torch.ops.aten
        reads = func._overloadpacket in (aten._local_scalar_dense, aten.nonzero, aten.equal, aten._unique2)
        indices = args[1] if func._overloadpacket in (aten.index, aten.index_put_) else ()
        if reads or any(index is not None and index.dtype == torch.bool for index in indices):
            self.found[func._overloadpacket.__name__] += 1
        return func(*args, **kwargs or {})


@pytest.mark.parametrize("names", [["one"], ["one", "two", "text"]])
def test_a_step_waits_for_the_device_once(engine, prompts, names):
    counts = []
    for length in (4, 9):
        waits, sampling = Waits(), make_sampling(max_completion_length=length)
        with waits:
            engine.generate(make_requests(prompts, *names), sampling)
        counts.append(waits.found)
    assert counts[1] - counts[0] == {"_local_scalar_dense": 5}


def test_groups_come_in_the_order_of_requests(engine, prompts):
    engine.policy_version = 7
    names = ["two", "text", "one"]
    groups = engine.generate(make_requests(prompts, *names), make_sampling())
    assert [group.group_id for group in groups] == [f"step-0/{name}" for name in names]
    assert all(group.prompt is prompts[name] for group, name in zip(groups, names, strict=True))
    assert [group.policy_version for group in groups] == [7, 7, 7]
    assert engine.generate([], make_sampling()) == []


def test_random_streams_are_those_of_group_completion_and_seed(engine, prompts):
    requests = [RolloutRequest("a", prompts["one"]), RolloutRequest("b", prompts["one"])]
    drawn = token_ids(engine.generate(requests, make_sampling()))
    assert len({tuple(row) for rows in drawn.values() for row in rows}) == 6
    other_seed = Sampling(num_generations=3, max_completion_length=12, temperature=1.0, seed=6)
    assert token_ids(engine.generate(requests, other_seed)) != drawn


def test_placeholder_tokens_are_never_sampled(engine, prompts):
    sampling = make_sampling(num_generations=32, max_completion_length=40, temperature=100.0)
    placeholders = {engine.model.config.image_token_id, engine.model.config.video_token_id}

    def sampled() -> set[int]:
        groups = engine.generate(make_requests(prompts, "one"), sampling)
        return {token for group in groups for c in group.completions for token in c.token_ids.tolist()}

    assert not placeholders & sampled()
    engine.banned_token_ids = []
    assert placeholders & sampled()


@pytest.mark.parametrize("truncation", [{"top_k": 1}, {"top_p": 1e-6}, {"min_p": 1.0}])
def test_truncation_to_the_best_token_is_greedy(engine, prompts, truncation):
    greedy = token_ids(engine.generate(make_requests(prompts), make_sampling(temperature=0.0)))
    assert token_ids(engine.generate(make_requests(prompts), make_sampling(**truncation))) == greedy
    assert token_ids(engine.generate(make_requests(prompts), make_sampling())) != greedy


def test_the_checkpoints_generation_config_is_not_used(engine, prompts, monkeypatch):
    expected = token_ids(engine.generate(make_requests(prompts), make_sampling()))
    for name, value in {"top_k": 1, "temperature": 0.1, "max_new_tokens": 2, "repetition_penalty": 5.0}.items():
        monkeypatch.setattr(engine.model.generation_config, name, value)
    assert token_ids(engine.generate(make_requests(prompts), make_sampling())) == expected


def test_a_prompt_and_its_images_are_computed_once_per_group(engine, prompts):
    requests = make_requests(prompts, "one", "two")
    patches = sum(len(prompts[name].mm_inputs["pixel_values"]) for name in ("one", "two"))
    counters = engine.vision.counters
    for max_num_seqs, num_batches in ((64, 1), (3, 2), (2, 2)):  # the last decodes groups of 3 in slices
        engine.max_num_seqs = max_num_seqs
        counters.clear()
        with recorded(engine.model.base_model) as calls:
            engine.generate(requests, make_sampling())
        prefills = [call for call in calls if "pixel_values" in call]
        assert len(prefills) == num_batches == counters["vision_forwards"]
        assert counters["vision_patches"] == patches
        assert {call["input_ids"].shape[1] for call in calls if "pixel_values" not in call} == {1}


def test_the_cache_is_used_and_modes_come_back_with_gradient_checkpointing_on(engine, prompts):
    model = engine.model.train()
    model.model.visual.eval()
    model.gradient_checkpointing_enable({"use_reentrant": False})
    modes = [(module.training, getattr(module, "gradient_checkpointing", None)) for module in model.modules()]
    try:
        with recorded(model.base_model) as calls:
            engine.generate(make_requests(prompts, "one"), make_sampling(max_completion_length=5))
        assert [call["input_ids"].shape[1] for call in calls] == [len(prompts["one"].token_ids), 1, 1, 1, 1]
        assert modes == [(m.training, getattr(m, "gradient_checkpointing", None)) for m in model.modules()]

        broken = Prompt(prompts["one"].sample, prompts["text"].token_ids, {}, {})
        with pytest.raises(TypeError, match="mm_token_type_ids"):
            engine.generate([RolloutRequest("g", broken)], make_sampling())
        assert modes == [(m.training, getattr(m, "gradient_checkpointing", None)) for m in model.modules()]
    finally:
        model.gradient_checkpointing_disable()


def test_position_state_on_the_model_does_not_matter(engine, prompts):
    requests = make_requests(prompts)
    expected = token_ids(engine.generate(requests, make_sampling()))
    for stale in (torch.tensor([[1000]]), torch.tensor([[-5]])):
        engine.model.model.rope_deltas = stale
        assert token_ids(engine.generate(requests, make_sampling())) == expected
    generate_with_transformers(engine.model, prompts["two"], banned=[], stops=NO_STOP, max_new_tokens=12)
    text = make_requests(prompts, "text")
    assert token_ids(engine.generate(text, make_sampling()))["step-0/text"] == expected["step-0/text"]


def test_a_completion_ends_with_its_stop_token_or_at_the_limit(tiny, model, prompts):
    engine = make_engine(model, tiny[2], MANY_STOPS)
    sampling = make_sampling(num_generations=32, max_completion_length=15, temperature=2.0)
    completions = engine.generate(make_requests(prompts, "one"), sampling)[0].completions
    assert {c.finish_reason for c in completions} == {"stop", "length"}
    for completion in completions:
        *body, last = completion.token_ids.tolist()
        assert not set(body) & set(MANY_STOPS)
        assert (last in MANY_STOPS) == (completion.finish_reason == "stop")
        assert completion.finish_reason == "stop" or len(body) + 1 == 15
        assert len(completion.generator_logprobs) == len(body) + 1
        assert completion.token_ids.untyped_storage().nbytes() == 8 * (len(body) + 1)  # pickles no sibling


def test_text_is_decoded_without_special_tokens(tiny, model):
    tokenizer = tiny[2]
    ids = [*tokenizer("7 , is it ?").input_ids, tokenizer.eos_token_id]
    engine, limit = make_engine(model, tokenizer, stops=[tokenizer.eos_token_id]), len(ids) + 2
    ends = EndOfTurn(engine.stop_token_ids, [], [limit], model.device)
    [completion] = engine.completions(
        [NO_TOKENS], torch.tensor([[*ids, 0, 0]]), torch.zeros(1, limit), ends, make_sampling()
    )
    assert (completion.text, completion.finish_reason) == ("7 , is it ?", "stop")
    assert completion.token_ids.tolist() == ids
