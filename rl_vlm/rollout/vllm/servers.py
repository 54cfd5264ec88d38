"""Rollouts with one or several vLLM servers, on other devices or other machines.

requests ─ round-robin, one per group, images once ─► servers ─► groups   a lost server's requests go to the others
weights ─ files in a shared folder, or NCCL ─► every server ─► its version, read back
"""

from __future__ import annotations

import itertools
import logging
import shutil
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from torch import Tensor

from rl_vlm.data.images import data_url, image_urls
from rl_vlm.errors import RolloutError
from rl_vlm.model.families import TokenRules
from rl_vlm.rollout.engine import WeightSource
from rl_vlm.rollout.vllm.arguments import ADAPTER_NAME
from rl_vlm.rollout.vllm.client import ServerLost, VLLMClient
from rl_vlm.rollout.vllm.nccl import NCCLSender
from rl_vlm.rollout.vllm.preemptions import METRIC, Preemptions, totals_of_servers
from rl_vlm.rollout.vllm.requests import (
    GeneratedTokens,
    GenerateRequest,
    GenerateResponse,
    PromptRenderer,
    check_length,
    sampling_arguments,
    to_groups,
    version_label,
)
from rl_vlm.types import Group, RolloutRequest, Sampling

RESET_TRIES = 20
"""Attempts, half a second apart, to reset a cache that is in use."""

MAX_FILE_BYTES = 5 * 10**9
"""Bytes at which a file of weights ends and the next begins. The main process holds one file's weights in memory."""

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
        """The one process that `sends_weights` writes weights for the servers to `folder`.

        `expected` are settings that the servers must have. Each server gets requests for `max_num_seqs` completions at
        once. `run` distinguishes this run's weights from other runs'. `close` stops servers started for this engine.
        Raises RolloutError if a server has other settings, refuses the token, or cannot be reached.
        """
        self.live = list(clients)
        self.tokens = tokens
        self.renderer = renderer
        self.folder = folder
        self.sends_weights = sends_weights
        self.policy_version = -1  # unknown weights: the policy's are sent before the first rollout
        self.has_adapter = False
        self.counters: Counter[str] = Counter()
        self.max_num_seqs = max_num_seqs
        self.run = run
        self.stop_servers = close
        self.is_closed = False
        self.turn = itertools.count()
        self.lock = threading.Lock()
        setups = [check_setup(client, expected) for client in clients]
        self.max_model_length = min(setup["max_model_len"] for setup in setups)
        self.preemptions = Preemptions(totals_of_servers(self.live) if sends_weights else {})
        by_nccl = sends_weights and all(setup["weight_transfer"] == "nccl" for setup in setups)
        self.senders = {client: NCCLSender(client) for client in clients} if by_nccl else {}

    def generate(self, requests: Sequence[RolloutRequest], sampling: Sampling) -> list[Group]:
        """Generate one group per request, in order.

        Raises DataError if a prompt is too long, RolloutError if no server is left, or if a server's prompt tokens or
        weights differ from the trainer's.
        """
        for request in requests:
            check_length(request, sampling, self.max_model_length)

        def send(parts: list[GenerateRequest]) -> list[GenerateResponse]:
            urls = {id(r.prompt): image_urls(r.prompt.sample) for r in requests}  # encoded once per prompt
            bodies = [
                self.body(part, [*urls[id(part.prompt)], *map(data_url, part.observed_images)], sampling)
                for part in parts
            ]
            num_completions = sum(part.num_completions for part in parts)
            at_once = max(1, self.max_num_seqs * len(parts) // max(1, num_completions))
            with ThreadPoolExecutor(at_once * len(self.live)) as pool:  # an error cancels requests that have not begun
                return list(pool.map(self.response_to, bodies))

        tokenizer = self.renderer.processor.tokenizer
        groups = to_groups(requests, send, sampling, self.policy_version, tokenizer, self.run)
        self.count_preemptions()
        return groups

    def count_preemptions(self) -> None:
        """Count new preemptions of all servers, in the one process that `sends_weights`.

        Other processes may still be generating. Their later preemptions are counted after the next rollout.
        """
        if not self.sends_weights:
            return
        if count := self.preemptions.new(totals_of_servers(self.live)):
            self.counters[METRIC] += count

    def response_to(self, body: dict[str, Any]) -> GenerateResponse:
        """Send a request to one server after another until one responds, and return the response."""
        while not self.is_closed:
            client = self.next_client()
            try:
                response = client.post("/inference/v1/generate", body)
                completions = [read_completion(client, choice) for choice in response["choices"]]
                self.check_not_older(client, completions)
                return GenerateResponse(response["prompt_token_ids"], completions)
            except ServerLost as error:
                self.lose(client, error)
            except (KeyError, TypeError) as error:
                raise RolloutError(f"The vLLM server {client.url} answers something else: {error!r}") from error
        raise RolloutError("The run has ended.")

    def check_not_older(self, client: VLLMClient, completions: Sequence[GeneratedTokens]) -> None:
        """Raise ServerLost if a server has older weights of this run, because it was removed during a sync."""
        labels = {version for completion in completions for version in completion.versions}
        others = labels - {version_label(self.policy_version, self.run)}
        if self.run and any(label.startswith(self.run) for label in others):
            raise ServerLost(f"The vLLM server {client.url} has weights that are older than the last.")

    def body(self, request: GenerateRequest, urls: Sequence[str], sampling: Sampling) -> dict[str, Any]:
        """Build a request to vLLM's tokens-in, tokens-out route, with the images at `urls`."""
        return {
            "token_ids": request.token_ids(self.renderer),
            "content_parts": [{"type": "image_url", "url": url} for url in urls] or None,
            "sampling_params": sampling_arguments(request, sampling, self.tokens),
            "return_token_ids": True,
            "model": ADAPTER_NAME if self.has_adapter else None,
        }

    def next_client(self) -> VLLMClient:
        """Return the next live server, round-robin."""
        with self.lock:
            return self.live[next(self.turn) % len(self.live)]

    def lose(self, client: VLLMClient, error: ServerLost) -> None:
        """Remove a lost server. Raises RolloutError if it was the last."""
        with self.lock:
            if client in self.live and len(self.live) > 1:
                self.live.remove(client)
                logger.warning("%s The run continues without it; servers left: %d.", error, len(self.live))
            elif client in self.live:
                raise RolloutError(
                    f"{error} No server is left. The run can be resumed from its last checkpoint once servers run."
                ) from error

    def sync(self, source: WeightSource, version: int) -> int:
        """Send the adapter, or the trained weights, to every server, and read back their versions.

        All ranks must call this. If shards cannot be written, they are still gathered to the end, since the other ranks
        wait in the all-gather.
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
            except (OSError, SafetensorError) as error:  # a full disk raises SafetensorError
                raise RolloutError(f"Weights for the servers cannot be written to {self.folder}: {error}") from error
            finally:
                shutil.rmtree(self.folder, ignore_errors=True)
        else:
            source.join_gathering()
        self.has_adapter = source.sends_adapter
        self.policy_version = version
        return num_bytes

    def sync_by_nccl(self, source: WeightSource, version: int) -> int:
        """Send the weights by NCCL to one server after the other. Each forms a process group with the trainer's GPU.

        Shards are gathered once and kept in CPU memory: the sender iterates over the weights several times, but the
        other ranks join only one all-gather.
        """
        gathered = [(name, weight.cpu()) for name, weight in source.trained_weights()] if source.is_sharded else None
        weights = source.trained_weights if gathered is None else gathered.__iter__
        num_bytes = sum(weight.nbytes for _, weight in weights())
        for client in list(self.live):
            self.update(client, lambda client: self.senders[client].send(weights), version)
        self.policy_version = version
        return num_bytes * len(self.live)

    def write(self, source: WeightSource) -> int:
        """Write the weights to `folder`, and return their size in bytes."""
        shutil.rmtree(self.folder, ignore_errors=True)
        if source.sends_adapter:
            return source.save_adapter(self.folder)
        from safetensors.torch import save_file

        num_bytes, weights = 0, source.trained_weights()
        try:
            self.folder.mkdir(parents=True)
            for i, part in enumerate(parts_of(weights, MAX_FILE_BYTES)):
                save_file(part, self.folder / f"weights-{i:05d}.safetensors")
                num_bytes += sum(weight.nbytes for weight in part.values())
        finally:
            for _ in weights:  # even after an error, since the other ranks wait in the all-gather
                pass
        return num_bytes

    def update(self, client: VLLMClient, send: Callable[[VLLMClient], None], version: int) -> None:
        """Send the weights to one server, reset its caches, and set its version. A lost server is removed."""
        try:
            send(client)
            reset_caches(client)
            self.set_label(client, version_label(version, self.run))
        except ServerLost as error:
            self.lose(client, error)

    def set_version(self, version: int) -> None:
        """Set the version of weights that the servers already have."""
        for client in self.live if self.sends_weights else ():
            self.set_label(client, version_label(version, self.run))
        self.policy_version = version

    def set_label(self, client: VLLMClient, label: str) -> None:
        """Set the version with which a server labels completions. Raises RolloutError if it reports another."""
        client.post("/update_weight_version", {"new_version": label})
        found = client.get("/weight_info")["weight_version"]
        if found != label:
            raise RolloutError(f"The vLLM server {client.url} has weights of version {found}, but was sent {label}.")

    def send_adapter(self, client: VLLMClient) -> None:
        """Unload the old adapter and load the new one. vLLM would read an adapter loaded in place at every request."""
        if ADAPTER_NAME in {model["id"] for model in client.get("/v1/models")["data"]}:
            client.post("/v1/unload_lora_adapter", {"lora_name": ADAPTER_NAME})
        path = str(self.folder.resolve())
        client.post("/v1/load_lora_adapter", {"lora_name": ADAPTER_NAME, "lora_path": path})

    def send_weights(self, client: VLLMClient) -> None:
        client.post("/start_weight_update")
        client.post("/update_weights", {"update_info": {"directory": str(self.folder.resolve())}})
        client.post("/finish_weight_update")

    def sleep(self) -> bool:
        """Return True: servers have their own devices."""
        return True

    def close(self) -> None:
        self.is_closed = True
        self.stop_servers()


def check_setup(client: VLLMClient, expected: dict[str, Any]) -> dict[str, Any]:
    """Return the server's settings. Raises RolloutError if they differ from the `expected` ones."""
    setup = client.get("/rl_vlm/setup")
    for name, value in expected.items():
        if setup[name] != value:
            raise RolloutError(
                f"The vLLM server {client.url} runs with {name} = {setup[name]}, but this run needs {value}. Start it "
                "with the run's own settings: rl-vlm serve CONFIG."
            )
    return setup


def reset_caches(client: VLLMClient) -> None:
    """Reset the caches that older weights have filled. Raises ServerLost if the prefix cache stays in use."""
    for _ in range(RESET_TRIES):
        if client.post("/reset_prefix_cache")["success"]:
            break
        time.sleep(0.5)
    else:
        raise ServerLost(f"The vLLM server {client.url} keeps its prefix cache, which is in use.")
    client.post("/reset_mm_cache")
    client.post("/reset_encoder_cache")


def read_completion(client: VLLMClient, choice: dict[str, Any]) -> GeneratedTokens:
    """Read one completion of a response. Raises ServerLost if the server aborted it, as a stopped server does."""
    if choice["finish_reason"] == "abort":
        raise ServerLost(f"The vLLM server {client.url} aborted a completion.")
    logprobs = [position["logprob"] for position in choice["logprobs"]["content"]]
    versions = [span["version"] for span in choice["weight_versions"] or ()]
    return GeneratedTokens(choice["token_ids"], logprobs, str(choice["finish_reason"]), versions)


def parts_of(weights: Iterable[tuple[str, Tensor]], max_bytes: int) -> Iterator[dict[str, Tensor]]:
    """Copy weights to host memory and yield them in parts. The weight that reaches `max_bytes` ends a part."""
    part: dict[str, Tensor] = {}
    for name, weight in weights:
        part[name] = weight.cpu().contiguous()
        if sum(tensor.nbytes for tensor in part.values()) >= max_bytes:
            yield part
            part = {}
    if part:
        yield part
