"""Rollouts with one or several vLLM servers, on other devices or other machines.

requests ─ in turn, one per group, images once ─► servers ─► groups       a lost server's requests go to the others
weights ─ files in a folder that all share, or NCCL ─► every server ─► its version, read back
"""

from __future__ import annotations

import itertools
import logging
import shutil
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from rl_vlm.errors import RolloutError
from rl_vlm.families import TokenRules
from rl_vlm.generation import WeightSource
from rl_vlm.generation.openai import image_urls
from rl_vlm.generation.vllm_client import ServerLost, VLLMClient
from rl_vlm.generation.vllm_common import ADAPTER_NAME
from rl_vlm.generation.vllm_nccl import NCCLSender
from rl_vlm.generation.vllm_questions import (
    Answer,
    PromptRenderer,
    Question,
    Reply,
    check_length,
    sampling_arguments,
    to_groups,
    version_label,
)
from rl_vlm.types import Group, RolloutRequest, Sampling

RESET_TRIES = 20
"""Times, half a second apart, that a server is asked to empty a cache that is in use."""

logger = logging.getLogger(__name__)


class VLLMServers:
    """A `RolloutEngine` on running vLLM servers."""

    def __init__(
        self,
        clients: Sequence[VLLMClient],
        tokens: TokenRules,
        renderer: PromptRenderer,
        folder: Path,
        sends_weights: bool,
        expected: dict[str, Any],
        max_num_seqs: int = 256,
        run: str = "",
        close: Callable[[], None] = lambda: None,
    ) -> None:
        """`folder` is where weights are put for the servers, by the one process that `sends_weights`.

        `expected` are parts of the set-up that the servers must have. Each server is asked for `max_num_seqs`
        completions at once. `run` tells this run's weights from another's. `close` stops what was started for it.
        Raises RolloutError for a server that has another set-up, refuses the token, or cannot be reached.
        """
        self.live = list(clients)
        self.tokens = tokens
        self.renderer = renderer
        self.folder = folder
        self.sends_weights = sends_weights
        self.policy_version = -1  # whatever weights they have: they are sent the policy's before the first rollout
        self.has_adapter = False
        self.max_num_seqs = max_num_seqs
        self.run = run
        self.stop_servers = close
        self.is_closed = False
        self.turn = itertools.count()
        self.lock = threading.Lock()
        setups = [check_setup(client, expected) for client in clients]
        self.max_model_length = min(setup["max_model_len"] for setup in setups)
        by_nccl = sends_weights and all(setup["weight_transfer"] == "nccl" for setup in setups)
        self.senders = {client: NCCLSender(client) for client in clients} if by_nccl else {}

    def generate(self, requests: Sequence[RolloutRequest], sampling: Sampling) -> list[Group]:
        """One group per request, in order.

        Raises DataError for prompts that are too long, RolloutError if no server is left, or one reads other prompts
        than the trainer or samples from other weights.
        """
        for request in requests:
            check_length(request, sampling, self.max_model_length)

        def ask(asked: list[Question]) -> list[Reply]:
            urls = {r.group_id: image_urls(r.prompt.sample) for r in requests}  # encoded once per group
            bodies = [self.body(question, urls[question.request.group_id], sampling) for question in asked]
            num_completions = sum(question.num_completions for question in asked)
            at_once = max(1, self.max_num_seqs * len(asked) // max(1, num_completions))
            with ThreadPoolExecutor(at_once * len(self.live)) as pool:  # an error cancels what has not begun
                return list(pool.map(self.reply, bodies))

        tokenizer = self.renderer.processor.tokenizer
        return to_groups(requests, ask, sampling, self.policy_version, tokenizer, self.run)

    def reply(self, body: dict[str, Any]) -> Reply:
        """Prompt ids and completions, by the first server that gives them."""
        while not self.is_closed:
            client = self.next_client()
            try:
                answer = client.post("/inference/v1/generate", body)
                answers = [read_choice(client, choice) for choice in answer["choices"]]
                self.check_not_older(client, answers)
                return Reply(answer["prompt_token_ids"], answers)
            except ServerLost as error:
                self.lose(client, error)
            except (KeyError, TypeError) as error:
                raise RolloutError(f"The vLLM server {client.url} answers something else: {error!r}") from error
        raise RolloutError("The run has ended.")

    def check_not_older(self, client: VLLMClient, answers: Sequence[Answer]) -> None:
        """Raises ServerLost for a server with older weights of this run: it was given up while they were sent."""
        labels = {version for answer in answers for version in answer.versions}
        others = labels - {version_label(self.policy_version, self.run)}
        if self.run and any(label.startswith(self.run) for label in others):
            raise ServerLost(f"The vLLM server {client.url} has weights that are older than the last.")

    def body(self, question: Question, urls: Sequence[str], sampling: Sampling) -> dict[str, Any]:
        """A question to vLLM's tokens-in, tokens-out route, with the images at `urls`."""
        return {
            "token_ids": question.token_ids(self.renderer),
            "content_parts": [{"type": "image_url", "url": url} for url in urls] or None,
            "sampling_params": sampling_arguments(question, sampling, self.tokens),
            "return_token_ids": True,
            "model": ADAPTER_NAME if self.has_adapter else None,
        }

    def next_client(self) -> VLLMClient:
        """The live servers in turn."""
        with self.lock:
            return self.live[next(self.turn) % len(self.live)]

    def lose(self, client: VLLMClient, error: ServerLost) -> None:
        """Go on without a server. Raises RolloutError if it was the last."""
        with self.lock:
            if client in self.live and len(self.live) > 1:
                self.live.remove(client)
                logger.warning("%s The run goes on without it; servers left: %d.", error, len(self.live))
            elif client in self.live:
                raise RolloutError(
                    f"{error} No server is left. The run can be resumed from its last checkpoint once servers run."
                ) from error

    def sync(self, source: WeightSource, version: int) -> int:
        """Send the adapter, or the trained weights, to every server, and read back their versions.

        Every rank calls it. Shards are gathered before anything else, since a rank that fails would leave the others
        waiting.
        """
        num_bytes = 0
        if self.sends_weights:
            send = self.send_adapter if source.sends_adapter else self.send_weights
            if self.senders and not source.sends_adapter:
                return self.sync_by_nccl(source, version)
            try:
                num_bytes = self.write(source) * len(self.live)
                with ThreadPoolExecutor(len(self.live)) as pool:
                    list(pool.map(lambda client: self.update(client, send, version), list(self.live)))
            except OSError as error:
                raise RolloutError(f"Weights for the servers cannot be written to {self.folder}: {error}") from error
            finally:
                shutil.rmtree(self.folder, ignore_errors=True)
        else:
            source.join_gathering()
        self.has_adapter = source.sends_adapter
        self.policy_version = version
        return num_bytes

    def sync_by_nccl(self, source: WeightSource, version: int) -> int:
        """One server after the other: each is a group of its own with the trainer's GPU.

        The weights are passed through several times, and the ranks that send none gather once: shards are kept in the
        CPU's memory.
        """
        gathered = [(name, weight.cpu()) for name, weight in source.trained_weights()] if source.is_sharded else None
        weights = source.trained_weights if gathered is None else gathered.__iter__
        num_bytes = sum(weight.nbytes for _, weight in weights())
        for client in list(self.live):
            self.update(client, lambda client: self.senders[client].send(weights), version)
        self.policy_version = version
        return num_bytes * len(self.live)

    def write(self, source: WeightSource) -> int:
        """Put the weights where the servers find them; returns their bytes."""
        shutil.rmtree(self.folder, ignore_errors=True)
        if source.sends_adapter:
            return source.save_adapter(self.folder)
        from safetensors.torch import save_file

        weights = {name: weight.cpu().contiguous() for name, weight in source.trained_weights()}
        self.folder.mkdir(parents=True)
        save_file(weights, self.folder / "weights.safetensors")
        return sum(weight.nbytes for weight in weights.values())

    def update(self, client: VLLMClient, send: Callable[[VLLMClient], None], version: int) -> None:
        """Send one server its weights, and make it forget what it computed with the old ones."""
        try:
            send(client)
            reset_caches(client)
            self.set_label(client, version_label(version, self.run))
        except ServerLost as error:
            self.lose(client, error)

    def set_version(self, version: int) -> None:
        """Name the weights that the servers have, where they need not be sent."""
        for client in self.live if self.sends_weights else ():
            self.set_label(client, version_label(version, self.run))
        self.policy_version = version

    def set_label(self, client: VLLMClient, label: str) -> None:
        """Servers label completions with the version that sampled them. Raises RolloutError if it is not taken on."""
        client.post("/update_weight_version", {"new_version": label})
        found = client.get("/weight_info")["weight_version"]
        if found != label:
            raise RolloutError(f"The vLLM server {client.url} has weights of version {found}, and was sent {label}.")

    def send_adapter(self, client: VLLMClient) -> None:
        """The old adapter makes room: one that is loaded in its place would be read from its files at every request."""
        if ADAPTER_NAME in {model["id"] for model in client.get("/v1/models")["data"]}:
            client.post("/v1/unload_lora_adapter", {"lora_name": ADAPTER_NAME})
        path = str(self.folder.resolve())
        client.post("/v1/load_lora_adapter", {"lora_name": ADAPTER_NAME, "lora_path": path})

    def send_weights(self, client: VLLMClient) -> None:
        client.post("/start_weight_update")
        client.post("/update_weights", {"update_info": {"directory": str(self.folder.resolve())}})
        client.post("/finish_weight_update")

    def close(self) -> None:
        self.is_closed = True
        self.stop_servers()


def check_setup(client: VLLMClient, expected: dict[str, Any]) -> dict[str, Any]:
    """The server's set-up. Raises RolloutError where it is not what the trainer needs."""
    setup = client.get("/rl_vlm/setup")
    for name, value in expected.items():
        if setup[name] != value:
            raise RolloutError(
                f"The vLLM server {client.url} runs with {name} = {setup[name]}, and this run needs {value}. Start it "
                "with the run's own settings: rl-vlm serve CONFIG."
            )
    return setup


def reset_caches(client: VLLMClient) -> None:
    """Empty the server's caches. Raises ServerLost if one stays in use, with what older weights computed."""
    for _ in range(RESET_TRIES):
        if client.post("/reset_prefix_cache")["success"]:
            break
        time.sleep(0.5)
    else:
        raise ServerLost(f"The vLLM server {client.url} keeps its prefix cache, which is in use.")
    client.post("/reset_mm_cache")
    client.post("/reset_encoder_cache")


def read_choice(client: VLLMClient, choice: dict[str, Any]) -> Answer:
    """One completion of an answer. Raises ServerLost for one that the server gave up, as it does when it is stopped."""
    if choice["finish_reason"] == "abort":
        raise ServerLost(f"The vLLM server {client.url} gave up a completion.")
    logprobs = [position["logprob"] for position in choice["logprobs"]["content"]]
    versions = [span["version"] for span in choice["weight_versions"] or ()]
    return Answer(choice["token_ids"], logprobs, str(choice["finish_reason"]), versions)
