"""Proves before the first step that the rows of a run are right, on its own device, with its own weights and rows.

A few of the first completions, shortened, are computed in several ways:

    dense rows, together ─► expected
    dense rows, one at a time, or with rounded embeddings ─► their own rounding, and so the bounds
    0  the same rows once more          equal: nothing is random, such as dropout
    1  the model's own forward          equal: positions, masks and images are the model's
    2  shared rows                      equal, log-probs and gradients: each prompt is computed once
    3  with other images                unlike: pixels arrive
       with the prompt of another row   unlike: prompts arrive
       beside other completions         equal: nothing leaks
    4  the engine's log-probs           equal, if the engine samples from the trained weights themselves
    5  trained weights                  have a gradient

A model without a row in the table of families has one more check before these, on its tower:

       images of several prompts in one run, and in a run each    equal, or else each prompt has a run

If shared rows are not proven, the run continues with a slower way that is proven: two SDPA calls instead of
FlexAttention, or dense rows. If another check fails, the run ends. An evaluation trains nothing, and leaves out
2 and 5.
"""

from __future__ import annotations

import logging
import operator
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from rl_vlm.config.schema import RunConfig
from rl_vlm.distributed.shards import whole_shape
from rl_vlm.distributed.strategy import Strategy
from rl_vlm.errors import ModelError, OutOfMemory, is_out_of_memory, shorten
from rl_vlm.model.in_memory import free_host_memory
from rl_vlm.model.probe import weights_behind
from rl_vlm.model.vision import input_shapes
from rl_vlm.passes.checked_groups import (
    ALL,
    CheckedSize,
    chosen,
    first_turns,
    last_of_each,
    of_other_lengths,
    shortened,
    with_exchanged_prompts,
    with_other_images,
    with_other_siblings,
)
from rl_vlm.passes.probing import CheckedRows, Probing, Way
from rl_vlm.passes.proof import (
    AGAIN,
    GRADIENTS,
    JOINED,
    OTHER_IMAGES,
    OTHER_PROMPTS,
    OWN_FORWARD,
    ROLLOUTS,
    ROWS,
    SHARED,
    SIBLINGS,
    SMALLEST_BOUND,
    Comparison,
    Expected,
    Proof,
    ProofCheck,
    device_name,
    logprob_difference,
    refuse,
)
from rl_vlm.passes.recovery import Failure, described, free_memory, tried
from rl_vlm.passes.rounds import Rounds
from rl_vlm.types import Prompt, ScoredGroup

logger = logging.getLogger(__name__)
NOT_TAKEN = "the model's own forward takes no such videos"
"""Reason why a check against the model's own forward is left out."""


class Checked(NamedTuple):
    """The rows of a proof, and the differences between dense rows, which give its bounds."""

    rows: CheckedRows
    turns: CheckedRows
    """First turns, which the model's own forward computes. Equal to `rows` if all completions have one turn."""
    sampled: list[ScoredGroup]
    """The groups of `rows` that an engine has sampled. Made-up groups follow them."""
    expected: Expected


class StartCheck:
    """Proves the rows of a run once, before the first step of a process."""

    def __init__(self, config: RunConfig, rounds: Rounds, strategy: Strategy | None = None) -> None:
        """`strategy` trains the policy; None if nothing is trained."""
        self.config = config
        self.rounds = rounds
        self.ranks = rounds.ranks
        self.strategy = strategy
        self.gathers = strategy is not None and strategy.equal_calls
        """Whether ranks gather weights together, and so must make equal calls."""
        self.size = ALL if config.model.verify == "full" else CheckedSize()
        self.is_due = config.model.verify != "off"
        self.proof = Proof()

    @property
    def way(self) -> Way:
        """Return how the run computes rows. They are shared if they can be."""
        return "shared" if self.strategy is not None and self.rounds.sharing in ("auto", "shared") else "dense"

    @property
    def longest(self) -> int:
        """Return the tokens of the longest completion to make up."""
        return self.config.model.verify_length or self.config.rollout.max_completion_length

    def run(self, groups: Sequence[ScoredGroup], policy_version: int | None = None) -> Proof:
        """Check rows of a few groups, and return the checks. All ranks must call it.

        `policy_version` is the policy's. Falls back to a slower way if shared rows are not proven. Raises
        ModelError on every rank if another check does not hold on any. If memory runs out, a check is skipped on every
        rank. If ranks gather weights together, they cannot skip it, and OutOfMemory is raised.
        """
        self.is_due, start, self.proof = False, time.perf_counter(), Proof(fallback=self.rounds.fallback)
        some = chosen(groups, self.size)
        self.prove_joined_images(some)
        if (checked := self.computed(some)) is not None:
            self.prove(checked, policy_version)
            logger.info("%s were checked in %.1f s", ROWS, time.perf_counter() - start)
        self.refuse_unproven()
        return self.proof

    def computed(self, groups: Sequence[ScoredGroup]) -> Checked | None:
        """Compute the rows to check. Note why, and return None on every rank, if a rank cannot compare its own."""
        if not all(self.ranks.gather([bool(groups)])):
            self.note(ProofCheck(ROWS, untried="a rank has no sampled token"))
            return None
        probing = Probing(self.rounds, self.gathers)
        checked: Checked | None = self.attempt(ROWS, lambda: self.checked(probing, groups), together=self.gathers)
        if checked is not None and not all(self.ranks.gather([checked.expected.is_finite])):
            self.note(ProofCheck(ROWS, untried="a log-prob or a gradient is not finite"))
            return None
        return checked

    def prove_joined_images(self, groups: Sequence[ScoredGroup]) -> None:
        """Let images of several prompts share a run of the tower if they can, and no row of the table says so.

        Later checks would not find a wrong way to join, since the bounds come from rows in other batches. A resumed run
        continues as recorded.
        """
        vision = self.rounds.policy.vision
        if vision.family.is_derived and vision.joined is None:
            check = self.joined_images(groups)
            self.note(check)
            self.rounds.join_images(all(self.ranks.gather([check.result == "holds"])))
        self.proof = replace(self.proof, joins_images=vision.joined)

    def joined_images(self, groups: Sequence[ScoredGroup]) -> ProofCheck:
        """Compare features from one run of the tower with those from a run for each prompt."""
        by_shapes: dict[Any, dict[bytes, Prompt]] = defaultdict(dict)
        for prompt in (group.group.prompt for group in groups if group.group.prompt.mm_inputs):
            by_shapes[input_shapes(prompt)][prompt.digest] = prompt
        prompts = list(max(by_shapes.values(), key=len, default={}).values())
        if len(prompts) < 2:
            return ProofCheck(JOINED, untried="no two prompts have other images of the same shapes")
        try:
            difference = Probing(self.rounds, self.gathers).joined_difference(prompts)
        except (ModelError, RuntimeError) as error:
            reason = shorten(str(error))
            return ProofCheck(JOINED, untried=reason) if is_out_of_memory(error) else ProofCheck(JOINED, problem=reason)
        return ProofCheck(
            JOINED, (Comparison("features", difference, SMALLEST_BOUND[self.rounds.policy.compute_dtype]),)
        )

    def refuse_unproven(self) -> None:
        """Raise ModelError if only the checks can say whether rows are right, and they could not be made."""
        family, checks = self.rounds.policy.family, self.proof.checks
        if not family.is_derived or any(check.of == OWN_FORWARD and check.untried is None for check in checks):
            return
        raise ModelError(
            f"model_type {family.model_type!r} has no row in the table of families, and it is not proven here: "
            f"{next((str(each) for each in checks if each.untried and each.of != JOINED), 'no check was made')}"
        )

    def prove(self, checked: Checked, policy_version: int | None) -> None:
        """Make all checks. If ranks gather weights together, make most of them on whole weights."""
        if not self.gathers:
            self.prove_forwards(checked)
            self.prove_shared_rows(checked)
            self.prove_contents(checked, policy_version)
            return
        self.prove_shared_rows(checked)
        if (problem := self.why_not_whole()) is not None:
            self.note(ProofCheck(OWN_FORWARD, untried=problem))
            return
        with self.whole_weights() as probing:
            rows = CheckedRows(probing, checked.rows.groups)
            turns = rows if checked.turns is checked.rows else CheckedRows(probing, checked.turns.groups)
            checked = checked._replace(rows=rows, turns=turns)
            self.prove_forwards(checked)
            self.prove_contents(checked, policy_version)

    def prove_forwards(self, checked: Checked) -> None:
        """Compare dense rows with themselves, and with the model's own forward."""
        self.add(AGAIN, lambda: self.again(checked))
        self.add(OWN_FORWARD, lambda: self.own_forward(checked))

    def prove_contents(self, checked: Checked, policy_version: int | None) -> None:
        """Check that log-probs depend on images and prompts only. Then check the engine's log-probs, and gradients."""
        self.add(SIBLINGS, lambda: self.siblings(checked))
        self.add(OTHER_IMAGES, lambda: self.other_images(checked))
        self.add(OTHER_PROMPTS, lambda: self.other_prompts(checked))
        self.add(ROLLOUTS, lambda: self.rollouts(checked, policy_version))
        if self.strategy is not None:
            self.add(GRADIENTS, lambda: self.gradients(checked))

    def why_not_whole(self) -> str | None:
        """Return why ranks cannot gather all weights at once, or None if they can."""
        if not self.config.rollout.ds3_gather_for_generation:
            return "rollout.ds3_gather_for_generation is false, and it needs whole weights on each device"
        needed = 4 * sum(whole_shape(parameter).numel() for parameter in self.rounds.policy.parameters())
        device, num = self.ranks.device, self.ranks.world_size
        free = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else free_host_memory() // num
        if all(self.ranks.gather([needed < free])):
            return None
        return "it needs whole weights, which do not fit beside the shards of each device"

    @contextmanager
    def whole_weights(self) -> Iterator[Probing]:
        """Gather all weights, so that ranks run forwards independently of each other."""
        assert self.strategy is not None
        self.gathers = False
        try:
            with self.strategy.gathered():
                yield Probing(self.rounds, together=False)
        finally:
            self.gathers = True

    def note(self, check: ProofCheck) -> None:
        """Record and log a check."""
        self.proof.checks.append(check)
        logger.info("%s", check)

    def attempt(self, of: str, compute: Callable[[], Any], together: bool) -> Any:
        """Compute something on every rank. Return None on every rank if memory runs out on any.

        If ranks compute it `together`, raise OutOfMemory instead.
        """
        found, failure = tried(compute)
        if failure is not None and together:
            raise OutOfMemory(f"the check before the first step: {failure}. Set model.verify: off to skip it")
        failures = list(filter(None, self.ranks.gather([failure])))
        if failures:
            free_memory()
            self.proof.checks.append(ProofCheck(of, untried=str(failures[0])))
            logger.warning("%s", self.proof.checks[-1])
            return None
        return found

    def add(self, of: str, compute: Callable[[], ProofCheck], may_fail: bool = False) -> bool:
        """Make a check, log it, and return whether it holds on every rank. If it must hold, raises ModelError."""
        check: ProofCheck | None = self.attempt(of, compute, together=self.gathers)
        if check is None:
            return True
        failed = [each for each in self.ranks.gather([None if check.holds else check]) if each is not None]
        self.note(failed[0] if failed and check.holds else check)  # a fault of another rank is this one's, too
        if not may_fail:
            with self.ranks.agree():
                refuse(check, self.ranks.device)
        return not failed

    def prove_shared_rows(self, checked: Checked) -> None:
        """Find the fastest way of sharing that is proven. Raises ModelError if the settings allow no other.

        Rows of the table stay shared if memory runs out in the check. Derived facts do not.
        """
        while self.way == "shared":
            slower = self.rounds.slower_way()
            holds = self.add(SHARED, lambda: self.shared_rows(checked), may_fail=slower is not None)
            failed = self.proof.checks[-1]
            if holds and (failed.untried is None or not self.rounds.policy.family.is_derived):
                return
            if slower is None:
                raise ModelError(f"{failed}. memory.prefix_sharing: dense computes each prompt once per completion")
            self.rounds.use(slower)
            self.proof = replace(self.proof, fallback=slower)
            logger.warning(
                "%s on %s. The run goes on with %s, which is slower", failed, device_name(self.ranks.device), slower
            )

    def checked(self, probing: Probing, groups: Sequence[ScoredGroup]) -> Checked:
        """Shorten groups, and compute dense rows: together, one at a time, and with rounded embeddings."""
        policy = self.rounds.policy
        dtype, sampled = policy.compute_dtype, [shortened(group, self.size) for group in groups]
        made = []
        if self.size.tries_lengths:
            context = getattr(policy.transformer.config.get_text_config(), "max_position_embeddings", None)
            made = of_other_lengths(sampled, self.longest, context)
        rows = CheckedRows(probing, [*sampled, *made])
        turns = [
            first_turns(group)
            for group in rows.groups
            if all(policy.family.own_forward_takes(group.group.prompt_of(m[0])) for m in group.group.by_prompt())
        ]
        is_single = len(turns) == len(rows.groups) and all(map(operator.is_, turns, rows.groups))
        trains = self.strategy is not None
        dense = probing.probe(rows.groups, "dense", trains)
        others = [
            probing.probe(rows.groups, "dense", trains, one_at_a_time=True),
            probing.probe(rows.groups, "dense", trains, rounding=torch.finfo(dtype).eps / 2),
        ]
        expected = Expected(dense, others, SMALLEST_BOUND[dtype])
        return Checked(rows, rows if is_single else CheckedRows(probing, turns), sampled, expected)

    def again(self, checked: Checked) -> ProofCheck:
        """Compute dense rows again, and compare them: the bounds would hide a random model."""
        expected = checked.expected
        difference = logprob_difference(checked.rows.logprobs("dense"), expected.dense.logprobs)
        return ProofCheck(AGAIN, (Comparison("log-probs", difference, expected.smallest_bound),))

    def own_forward(self, checked: Checked) -> ProofCheck:
        """Compare first turns with the model's own forward, which encodes images and computes positions itself."""
        turns = checked.turns
        if not turns.groups:
            return ProofCheck(OWN_FORWARD, untried=NOT_TAKEN)
        return ProofCheck(OWN_FORWARD, checked.expected.equal_logprobs(turns.logprobs("own"), turns.logprobs("dense")))

    def shared_rows(self, checked: Checked) -> ProofCheck:
        """Compare rows that share a prompt with rows that do not. Derived facts may not allow to compute them."""
        rows = checked.rows
        try:
            found = rows.probing.probe(rows.groups, "shared", has_gradient=True)
        except (ModelError, RuntimeError) as error:
            if not self.rounds.policy.family.is_derived:
                raise
            return ProofCheck(SHARED, problem=f"shared rows cannot be computed ({shorten(str(error))})")
        return ProofCheck(SHARED, checked.expected.equal(found))

    def other_images(self, checked: Checked) -> ProofCheck:
        """Check whether log-probs depend on pixels, in the model's own forward and in the run's rows."""
        turns = checked.turns
        if not turns.groups:
            return ProofCheck(OTHER_IMAGES, untried=NOT_TAKEN)
        if not any(group.group.prompt_of(0).mm_inputs for group in turns.groups):
            return ProofCheck(OTHER_IMAGES, untried="no prompt has an image")
        others = CheckedRows(turns.probing, [with_other_images(group) for group in turns.groups])
        if logprob_difference(others.logprobs("own"), turns.logprobs("own")) == 0:
            return ProofCheck(OTHER_IMAGES, untried="the model's own forward does not depend on images")
        moved = logprob_difference(others.logprobs(self.way), turns.logprobs(self.way))
        return ProofCheck(OTHER_IMAGES, (Comparison("log-probs", moved, 0.0, unlike=True),))

    def other_prompts(self, checked: Checked) -> ProofCheck:
        """Check whether log-probs depend on prompts."""
        turns = checked.turns
        if len({tuple(group.group.prompt.token_ids.tolist()) for group in turns.groups}) < 2:
            return ProofCheck(OTHER_PROMPTS, untried="there is one prompt")
        others = CheckedRows(turns.probing, with_exchanged_prompts(turns.groups))
        moved = logprob_difference(others.logprobs(self.way), turns.logprobs(self.way))
        return ProofCheck(OTHER_PROMPTS, (Comparison("log-probs", moved, 0.0, unlike=True),))

    def siblings(self, checked: Checked) -> ProofCheck:
        """Compare the last completion of each group with itself in a row with other completions."""
        rows = checked.rows
        if all(len(group.group.completions) < 2 for group in rows.groups):
            return ProofCheck(SIBLINGS, untried="there is one completion per prompt")
        others = CheckedRows(rows.probing, [with_other_siblings(group) for group in rows.groups])
        found, before = others.of_completions(self.way), rows.of_completions(self.way)
        found, before = (torch.cat([some[i] for i in last_of_each(rows.groups)]) for some in (found, before))
        return ProofCheck(SIBLINGS, checked.expected.equal_logprobs(found, before))

    def rollouts(self, checked: Checked, policy_version: int | None) -> ProofCheck:
        """Compare the sampled log-probs with dense rows, if the engine samples from the trained weights themselves."""
        rollout = self.config.rollout
        if not rollout.facts.samples_from_policy:
            return ProofCheck(ROLLOUTS, untried="the engine has a check of its own")
        is_resumed = self.strategy is not None and rollout.max_rollout_tokens is not None
        if is_resumed or any(group.group.policy_version != policy_version for group in checked.sampled):
            return ProofCheck(ROLLOUTS, untried="the completions are from older weights")
        completions = [completion for group in checked.sampled for completion in group.group.completions]
        lengths = [len(completion.token_ids) for completion in completions]
        dense = checked.expected.dense.logprobs[: sum(lengths)].split(lengths)
        # a completion that failed before its first turn has a token that no engine sampled
        compared = [(c.generator_logprobs, row) for c, row in zip(completions, dense, strict=True) if not c.fault]
        if not compared:
            return ProofCheck(ROLLOUTS, untried="all completions are faults")
        sampled, computed = map(torch.cat, zip(*compared, strict=True))
        return ProofCheck(ROLLOUTS, checked.expected.equal_logprobs(sampled, computed))

    def gradients(self, checked: Checked) -> ProofCheck:
        """Check whether each trained weight has a gradient. It may be zero, as for a new adapter's `lora_A`."""
        assert self.strategy is not None
        policy, dense = self.rounds.policy, checked.expected.dense
        trained = {name: p for name, p in policy.model.named_parameters() if p.requires_grad}
        behind = self.weights_behind_features(checked)
        if lost := [name for name, p in trained.items() if id(p) in behind]:
            return ProofCheck(GRADIENTS, problem=f"{lost[0]} gets no gradient from features of images")
        if self.strategy.equal_calls:
            return ProofCheck(GRADIENTS, untried="they are sharded between ranks")
        vision = set(map(id, policy.family.vision_parameters(policy.transformer)))
        untried = why_no_tower(checked)
        parts = {
            "the language model": [name for name, p in trained.items() if id(p) not in vision],
            "the vision tower": [name for name, p in trained.items() if id(p) in vision],
        }
        seen = {part: names for part, names in parts.items() if part != "the vision tower" or untried is None}
        without = {part: [n for n in names if id(trained[n]) not in dense.weights] for part, names in seen.items()}
        for part, names in seen.items():
            if names and len(without[part]) == len(names):
                return ProofCheck(GRADIENTS, problem=f"no trained weight of {part} has a gradient")
        unused = [name for names in without.values() for name in names]
        left = 0 if untried is None else len(parts["the vision tower"])
        check = ProofCheck(GRADIENTS, found=gradients_found(len(trained) - left, unused, left, untried))
        if unused:
            logger.warning("%s", check)
        return check

    def weights_behind_features(self, checked: Checked) -> set[int]:
        """Return the `id`s of trained weights that the features of a frozen tower depend on.

        The tower runs without gradients, so these weights would learn nothing from images. Features can be embeddings
        of the language model (Emu3).
        """
        policy, vision = self.rounds.policy, self.rounds.policy.vision
        prompts = [group.group.prompt for group in checked.rows.groups if group.group.prompt.mm_inputs][:1]
        if not vision.family.is_derived or not vision.is_frozen or not prompts:
            return set()

        def describe(error: RuntimeError) -> Failure:
            return Failure.of(error, prompts, num_completions=0, tokens=len(prompts[0].token_ids))

        with described(describe), checked.rows.probing.apart("dense"), policy.autocast(), torch.enable_grad():
            return weights_behind(vision.run(prompts)[prompts[0]].embeddings)


def why_no_tower(checked: Checked) -> str | None:
    """Return why rows do not say whether the weights of the vision tower have gradients, or None if they do."""
    if not any(group.group.prompt.mm_inputs for group in checked.rows.groups):
        return "no prompt has an image"
    return "it runs apart from the rows" if checked.expected.dense.vision_apart else None


def gradients_found(num: int, unused: Sequence[str], left: int, untried: str | None) -> str:
    """Describe which of `num` trained weights have a gradient, and why `left` weights of the tower were not tried."""
    named = f", not {', '.join(unused[:3])}{', …' if len(unused) > 3 else ''}" if unused else ""
    found = f"have a gradient: {num - len(unused)} of {num}{named}"
    if left:
        return f"{found}; {left} of the vision tower were not tried, since {untried}"
    return found if unused else "all have a gradient"
