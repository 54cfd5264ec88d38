"""Expected time of a training pass on a GPU, from counted FLOPs and bytes: no GPU is needed.

    python benchmarks/roofline.py                       Qwen2.5-VL-3B and 7B on an H100
    python benchmarks/roofline.py --shapes 3b --card h200
    python benchmarks/roofline.py --docs                write the tables of docs/benchmarks.md

This project's own code runs on tensors without memory: one decoder layer forward and backward, the LM head over all
completions, and the vision tower over one image. `benchmarks/kernel_counts.py` counts their kernels. A matrix product
takes the longer of FLOPs / rate and bytes / bandwidth, and any other kernel bytes / bandwidth. Head and tower take at
least the time in which the host launches their kernels. FlexAttention is arithmetic: its pairs of tokens, and a
backward of 2.5 forwards. Embeddings, position angles, masks and the loss are left out.

`before` computes with plain operators, PEFT's LoRA layers and the tower's windows one by one. `now` has fused layers,
LoRA in one function, and an LM head with fused elementwise operators, as a run on one GPU.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

sys.path.insert(0, str(Path(__file__).parents[1]))  # run as a script

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from benchmarks.common import markdown_table
from benchmarks.flops import Training, Workload, shared_row, unique_flops
from benchmarks.kernel_counts import CountedGraphs, Kernel, PlainKernels, Work, host_reads
from benchmarks.shapes import SHAPES, Shape, model_config
from benchmarks.sides import Setup
from rl_vlm.model import head, lora_linear
from rl_vlm.model import policy as policies
from rl_vlm.model.fused import compile_layers
from rl_vlm.model.head import Head
from rl_vlm.model.loading import load_policy
from rl_vlm.model.policy import Policy
from rl_vlm.model.shared_prefix import RowLayout
from rl_vlm.plan.tracing.fake import fake_tensors, make_fake
from rl_vlm.plan.tracing.gpu_attention import attention_as_on_gpu
from rl_vlm.types import Prompt

GROUPS = 8
"""Groups of a step, which share its update of the weights."""
UPDATE_BYTES, SUM_BYTES = 28, 12
"""Per trained weight: AdamW's update of the weight and two moments, and adding a micro-batch's gradient."""
ATTENTION_BACKWARD = 2.5
"""In forwards: five products instead of two."""
WORK = Workload(completion_tokens=800)
TRAININGS = {
    "full": Training(),
    "full, checkpointing": Training(gradient_checkpointing=True),
    "LoRA r32": Training(lora_r=32),
    "LoRA r32, checkpointing": Training(lora_r=32, gradient_checkpointing=True),
}


NUM_COUNTED = 2
"""Layers that are counted: one for all but the last, and the last."""


@dataclass(frozen=True)
class Card:
    """Rates that large kernels reach on a card."""

    peak: float
    """FLOP/s of the data sheet, for the MFU."""
    products: float = 650e12
    attention: float = 140e12
    bandwidth: float = 2.5e12
    launches: float = 1e5
    """Kernels that the host launches in a second: 10 microseconds for each operator of PyTorch."""

    def seconds(self, kernel: Kernel) -> float:
        """Return the time of a kernel."""
        rate = self.attention if kernel.kind == "attention" else self.products
        return max(kernel.flops / rate, kernel.bytes / self.bandwidth)


CARDS = {"h100": Card(989e12), "h200": Card(989e12, bandwidth=3.6e12)}


@dataclass(frozen=True)
class Pass:
    """The work of a training pass over one group."""

    layer: Work
    last_layer: Work
    """The last layer. Checkpointing with a frozen head does not recompute it."""
    attention: Kernel
    """FlexAttention of a layer, forward and backward."""
    last_attention: Kernel
    head: Work
    tower: Work
    num_layers: int
    update: Kernel
    model_flops: float
    """Without recomputation."""

    def seconds(self, card: Card) -> dict[str, float]:
        """Return the seconds of each part."""

        def of(work: Work, *kinds: Any) -> float:
            return sum(card.seconds(kernel) for kernel in work.of(*kinds))

        def of_layers(*kinds: Any) -> float:
            return (self.num_layers - 1) * of(self.layer, *kinds) + of(self.last_layer, *kinds)

        layers = {
            "products": of_layers("product"),
            "attention": (self.num_layers - 1) * card.seconds(self.attention) + card.seconds(self.last_attention),
            "elementwise": of_layers("elementwise"),
            "weights": of_layers("weights") + card.seconds(self.update),
        }
        return layers | {"head": whole_seconds(self.head, card), "tower": whole_seconds(self.tower, card)}

    def utilization(self, card: Card) -> float:
        """Return the MFU: the share of the card's peak that is left for the model's own FLOPs."""
        return self.model_flops / card.peak / sum(self.seconds(card).values())


def whole_seconds(work: Work, card: Card) -> float:
    """Return the time of a part, at least that of launching it."""
    return max(sum(map(card.seconds, work.kernels)), len(work.kernels) / card.launches)


def count_pass(shape: Shape, training: Training, work: Workload, is_fused: bool) -> Pass:
    """Count the kernels of a pass, as before or as now (`is_fused`)."""
    layers = [meta_policy(shape, training, work, is_fused)[0] for _ in range(NUM_COUNTED)]
    policy, prompt = meta_policy(shape, training, work, is_fused)
    layout = RowLayout.build([work.prompt_tokens], [[work.completion_tokens] * work.num_generations])
    # Other modes than that of fake tensors would keep torch.compile from compiling.
    with FakeTensorMode(allow_non_fake_inputs=True) if is_fused else fake_tensors():
        for each in layers:
            make_fake(each)
        layer, last_layer = (count_layer(each, layout, is_fused, index) for index, each in enumerate(layers))
    with fake_tensors():
        make_fake(policy)
        scored = count_head(policy, work.num_generations * work.completion_tokens, is_fused)
        tower = count_tower(policy, prompt, is_fused)
    depth = shape[0]["num_hidden_layers"]
    trained = sum(
        parameter.numel() * (depth - 1 if ".layers.0." in name else 1)
        for name, parameter in policy.transformer.named_parameters()
        if parameter.requires_grad
    )
    language: Any = policy.transformer.get_decoder()
    keeps_last = not language.layers[-1].gradient_checkpointing
    return Pass(
        layer=layer,
        last_layer=last_layer,
        attention=flex_attention(shape[0], work, training.gradient_checkpointing),
        last_attention=flex_attention(shape[0], work, training.gradient_checkpointing and not keeps_last),
        head=scored,
        tower=tower,
        num_layers=depth,
        update=Kernel("weights", 0.0, trained * (SUM_BYTES + UPDATE_BYTES / GROUPS)),
        model_flops=unique_flops(model_config(shape), work, training).total,
    )


def meta_policy(shape: Shape, training: Training, work: Workload, is_fused: bool) -> tuple[Policy, Prompt]:
    """Make the policy with two decoder layers, as before or as now, and the prompt. Weights are on the meta device."""
    with tempfile.TemporaryDirectory() as directory:
        small: Shape = (shape[0] | {"num_hidden_layers": NUM_COUNTED}, shape[1])
        setup = Setup.build(small, work, training, Path(directory), torch.device("meta"))
        model = setup.config.model.model_copy(update={"dtype": "bfloat16"})
        config = setup.config.model_copy(update={"model": model})
        stock_layers = mock.patch.object(lora_linear, "with_lora_linear", lambda adapter, in_4bit: adapter)
        with nullcontext() if is_fused else stock_layers:
            policy = load_policy(config, str(setup.checkpoint), empty=True).train()
    prompt = setup.group.group.prompt
    policy.family.prompt_positions(policy.transformer, prompt)
    return policy, prompt


def count_layer(policy: Policy, layout: RowLayout, is_fused: bool, index: int) -> Work:
    """Count a decoder layer over the row of a group, forward and backward, without its attention."""
    language: Any = policy.transformer.get_decoder()
    layer, tokens = language.layers[index], len(layout.row_owner)
    row = hidden_states(policy, 1, tokens)
    angles = language.rotary_emb(row, torch.arange(tokens).expand(3, 1, -1))
    gradient = torch.ones_like(row)
    graphs, plain = CountedGraphs(layer.parameters()), PlainKernels(layer.parameters())
    if is_fused:
        compile_layers(policy, graphs.backend)
    with nullcontext() if is_fused else plain, attention_as_on_gpu():
        with policy.autocast(keeps_casts=False):
            output = layer(row, attention_mask=layout, position_ids=None, position_embeddings=angles)
        output.backward(gradient)
    if not is_fused:
        return plain.work
    text = language.config  # queries and keys are cast before attention, outside of the graphs
    values = tokens * (1 + text.num_key_value_heads / text.num_attention_heads) * text.hidden_size
    casts = 2 * (2 + layer.gradient_checkpointing)
    graphs.work.kernels += casts * [Kernel("elementwise", 0.0, values / 2 * (4 + 2))]
    return graphs.work


def flex_attention(text: dict[str, Any], work: Workload, is_recomputed: bool) -> Kernel:
    """Compute the work of FlexAttention in a layer."""
    passes = 1 + ATTENTION_BACKWARD + is_recomputed
    width = text["hidden_size"] * (2 + 2 * text["num_key_value_heads"] / text["num_attention_heads"])
    return Kernel(
        "attention", passes * 4 * shared_row(work).pairs * text["hidden_size"], passes * 2 * work.unique_tokens * width
    )


def count_head(policy: Policy, scored: int, is_fused: bool) -> Work:
    """Count the LM head over all completion tokens, forward and backward."""
    hidden, targets = hidden_states(policy, scored), torch.zeros(scored, dtype=torch.int64)
    module: Any = policy.transformer.get_output_embeddings()
    counter = PlainKernels(module.parameters())

    def fused_head(logits: Any, temperature: float, banned: Any, fused: bool) -> Head:
        return Head(logits, temperature, banned, fused=is_fused)

    with counter, mock.patch.multiple(head, compiled=counter.fused), mock.patch.object(policies, "Head", fused_head):
        policy.logprobs(hidden, targets)[0].sum().backward()
    return counter.work


def count_tower(policy: Policy, prompt: Prompt, is_fused: bool) -> Work:
    """Count the vision tower on the image, with a backward if it is trained."""
    if not is_fused:
        policy.transformer.set_attn_implementation({"vision_config": "sdpa"})
    tower: Any = policy.transformer.base_model
    counter = PlainKernels(tower.visual.parameters())
    with counter, host_reads(counter.work), torch.set_grad_enabled(not policy.vision.is_frozen):
        with policy.autocast(keeps_casts=False):
            features = policy.vision.run([prompt])[prompt].embeddings
        if features.requires_grad:
            features.backward(torch.ones_like(features))
    return counter.work


def hidden_states(policy: Policy, *sizes: int) -> Tensor:
    """Make hidden states in the dtype of the embeddings, as the layers add to them."""
    embeddings: Any = policy.transformer.get_input_embeddings()
    return torch.zeros(*sizes, embeddings.embedding_dim, dtype=embeddings.weight.dtype, requires_grad=True)


PARTS = ("products", "attention", "elementwise", "weights", "head", "tower")


def time_rows(name: str, passes: dict[str, Pass], card: Card) -> list[list[str]]:
    """Return the rows of the table of times for a training, before and now."""
    rows = []
    for way, counted in passes.items():
        seconds = counted.seconds(card)
        cells = [f"{1e3 * value:.0f}" for value in (*seconds.values(), sum(seconds.values()))]
        rows.append([name, way, *cells, f"{counted.utilization(card):.0%}"])
    return rows


def work_rows(name: str, passes: dict[str, Pass]) -> list[list[str]]:
    """Return the rows of the table of bytes, launches and reads for a training."""
    rows = []
    for part in ("layer", "head", "tower"):
        works: list[Work] = [getattr(counted, part) for counted in passes.values()]
        moved = [f"{sum(kernel.bytes for kernel in work.kernels) / 1e9:.2f}" for work in works]
        launches = [f"{len(work.kernels):,}" for work in works]
        rows.append([name, part, *moved, *launches, *(str(work.reads) for work in works)])
    return rows


def tables(counted: dict[tuple[str, str], dict[str, Pass]], card: str) -> str:
    """Return the tables of times on a card, and of counts."""
    times, works = [], []
    for (shape, training), passes in counted.items():
        times += time_rows(f"{shape}, {training}", passes, CARDS[card])
        works += work_rows(f"{shape}, {training}", passes)
    ways = [f"{what} {way}" for what in ("GB", "launches", "reads") for way in ("before", "now")]
    return "\n\n".join(
        [markdown_table([card, "", *PARTS, "ms", "MFU"], times), markdown_table(["counted", "part", *ways], works)]
    )


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=["3b", "7b"])
    parser.add_argument("--card", choices=CARDS, default="h100")
    parser.add_argument("--docs", action="store_true", help="write the tables of docs/benchmarks.md")
    options = parser.parse_args(arguments)
    counted = {
        (shape, name): {way: count_pass(SHAPES[shape], training, WORK, way == "now") for way in ("before", "now")}
        for shape in options.shapes
        for name, training in TRAININGS.items()
    }
    text = tables(counted, options.card)
    print(text)
    if options.docs:
        from benchmarks.report import PAGE, fill

        PAGE.write_text(fill(PAGE.read_text(), "roofline", text))


if __name__ == "__main__":
    main()
