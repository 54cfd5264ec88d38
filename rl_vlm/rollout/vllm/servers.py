"""Rollouts with one or several vLLM servers, on other devices or other machines.

requests ─ round-robin, one per group, images once ─► servers ─► groups   a lost server's requests go to the others
turns of trajectories ─ one request each, at any time ─► servers ─► completions
weights ─ files in a shared folder, or NCCL ─► every server ─► its version, read back   a lost server may be back
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
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from torch import Tensor

from rl_vlm.data.images import data_url, image_urls
from rl_vlm.errors import RolloutError
from rl_vlm.model.families import TokenRules
from rl_vlm.rollout.engine import RolloutEngine, Submitted, TurnLost, WeightSource
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
    generate_requests,
    sampling_arguments,
    to_completions,
    to_groups,
    version_label,
)
from rl_vlm.rollout.vllm.videos import video_url
from rl_vlm.types import Group, Prompt, RolloutRequest, Sampling

RESET_TRIES = 20
"""Attempts, half a second apart, to reset a cache that is in use."""

BACK_SECONDS = 2.0
"""Seconds in which a lost server must answer a health check to be used again. Each sync asks it."""

UNSENT = "default"
"""vLLM's label of the weights with which a server starts, before any are sent."""

MAX_FILE_BYTES = 5 * 10**9
"""Bytes at which a file of weights ends and the next begins. The main process holds one file's weights in memory."""

ContentPart = dict[str, str]
"""An image or a video of a request to vLLM."""

logger = logging.getLogger(__name__)


class VLLMServers(RolloutEngine):
    """Samples from running vLLM servers, which have their own devices."""

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
        self.clients = list(clients)
        self.live = list(clients)
        self.last_loss: str | None = None
        """Message about the last live server, if it was lost."""
        self.expected = expected
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
            media = {part.prompt: part for part in parts}
            encoded = {prompt: media_parts(part) for prompt, part in media.items()}  # once per prompt
            bodies = [self.body(part, encoded[part.prompt], sampling) for part in parts]
            num_completions = sum(part.num_completions for part in parts)
            at_once = max(1, self.max_num_seqs * len(parts) // max(1, num_completions))
            with ThreadPoolExecutor(at_once * len(self.live)) as pool:  # an error cancels requests that have not begun
                return list(pool.map(self.response_to, bodies))

        tokenizer = self.renderer.processor.tokenizer
        groups = to_groups(requests, send, sampling, self.policy_version, tokenizer, self.run)
        self.count_preemptions()
        return groups

    @contextmanager
    def session(self, sampling: Sampling) -> Iterator[ServerSession]:
        """Return the context in which turns of trajectories are sampled one by one.

        Raises RolloutError if no server was left before.
        """
        self.check_live()
        pool = ThreadPoolExecutor(self.max_num_seqs * len(self.live))
        try:
            yield ServerSession(self, pool, sampling)
        finally:
            pool.shutdown(cancel_futures=True)
        self.count_preemptions()

    def count_preemptions(self) -> None:
        """Count new preemptions of all servers, in the one process that `sends_weights`.

        Other processes may still be generating. Their later preemptions are counted after the next rollout.
        """
        if not self.sends_weights:
            return
        if count := self.preemptions.new(totals_of_servers(self.live)):
            self.counters[METRIC] += count

    def response_to(self, body: dict[str, Any]) -> GenerateResponse:
        """Send a request to one server after another until one responds, and return the response.

        Another server samples the same tokens, since it has the same weights. Raises TurnLost if none is left.
        """
        while not self.is_closed:
            self.check_live()
            client = self.next_client()
            try:
                return self.asked(client, body)
            except ServerLost as error:
                if not self.is_closed:  # servers that the run stops are not lost
                    self.lose(client, error)
        raise RolloutError("The run has ended.")

    def asked(self, client: VLLMClient, body: dict[str, Any]) -> GenerateResponse:
        """Send a request to a server, and return its response. Raises ServerLost if another server may succeed."""
        sampled = body["sampling_params"]["n"] * body["sampling_params"]["max_tokens"]
        try:
            response = client.post("/inference/v1/generate", body, self.max_model_length + sampled)
            completions = [read_completion(client, choice) for choice in response["choices"]]
            self.check_weights(client, {version for completion in completions for version in completion.versions})
            return GenerateResponse(response["prompt_token_ids"], completions)
        except ServerLost:
            raise
        except RolloutError:  # a server that has restarted does not know the adapter
            self.check_weights(client, {str(client.get("/weight_info")["weight_version"])})
            raise
        except (KeyError, TypeError) as error:
            raise RolloutError(f"The vLLM server {client.url} answers something else: {error!r}") from error

    def check_weights(self, client: VLLMClient, labels: set[str]) -> None:
        """Raise ServerLost if a server has restarted, or has older weights of this run since it missed a sync."""
        others = labels - {version_label(self.policy_version, self.run)}
        if UNSENT in others:
            raise ServerLost(f"The vLLM server {client.url} has restarted, and was not sent the run's weights yet.")
        if self.run and any(label.startswith(self.run) for label in others):
            raise ServerLost(f"The vLLM server {client.url} has weights that are older than the last.")

    def body(self, request: GenerateRequest, media: Sequence[ContentPart], sampling: Sampling) -> dict[str, Any]:
        """Build a request to vLLM's tokens-in, tokens-out route. `media` are the images and videos of its prompt."""
        observed = [image_part(data_url(file)) for file in request.observed_images]
        return {
            "token_ids": request.token_ids(self.renderer),
            "content_parts": [*media, *observed] or None,
            "sampling_params": sampling_arguments(request, sampling, self.tokens),
            "return_token_ids": True,
            "model": ADAPTER_NAME if self.has_adapter else None,
        }

    def next_client(self) -> VLLMClient:
        """Return the next live server, round-robin."""
        with self.lock:
            return self.live[next(self.turn) % len(self.live)]

    def lose(self, client: VLLMClient, error: ServerLost) -> None:
        """Remove a lost server until the next sync. Raises TurnLost if it was the last."""
        with self.lock:
            if client in self.live and len(self.live) > 1:
                self.live.remove(client)
                logger.warning("%s The run continues without it; servers left: %d.", error, len(self.live))
            elif client in self.live:
                self.last_loss = (
                    f"{error} No server is left. The run can be resumed from its last checkpoint once servers run."
                )
                raise TurnLost(self.last_loss) from error

    def check_live(self) -> None:
        """Raise TurnLost if the last server was lost, and no weights were sent since then."""
        if self.last_loss is not None:
            raise TurnLost(self.last_loss)

    def take_back(self) -> None:
        """Use lost servers again if they answer and have the run's settings. They are sent the next weights."""
        lost = [client for client in self.clients if client not in self.live or self.last_loss]
        self.last_loss = None
        if not lost:
            return
        with ThreadPoolExecutor(len(lost)) as pool:
            back = [client for client, is_back in zip(lost, pool.map(self.is_back, lost), strict=True) if is_back]
        for client in back:
            logger.warning("The vLLM server %s answers again, and is sent the run's weights.", client.url)
        self.senders |= {client: NCCLSender(client) for client in back if self.senders}
        self.live = [client for client in self.clients if client in back or client not in lost] or self.live

    def is_back(self, client: VLLMClient) -> bool:
        """Return whether a lost server answers, with the settings that the run needs."""
        try:
            return client.is_healthy(BACK_SECONDS) and bool(check_setup(client, self.expected))
        except RolloutError as error:
            logger.warning("%s", error)
            return False

    def sync(self, source: WeightSource, version: int) -> int:
        """Send the adapter, or the trained weights, to every server, and read back their versions.

        All ranks must call this. If shards cannot be written, they are still gathered to the end, since the other ranks
        wait in the all-gather.
        """
        num_bytes = 0
        self.take_back()
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

    def close(self) -> None:
        self.is_closed = True
        self.stop_servers()


class ServerSession:
    """Samples turns of trajectories on servers, each as soon as it is submitted."""

    def __init__(self, servers: VLLMServers, pool: ThreadPoolExecutor, sampling: Sampling) -> None:
        self.servers = servers
        self.pool = pool
        self.sampling = sampling
        self.media: dict[Prompt, list[ContentPart]] = {}
        """The images and videos of prompts, which are encoded once."""

    def submit(self, request: RolloutRequest) -> Submitted:
        """Send a request for the next turn of one completion. Raises DataError if it is too long.

        Only threads of the pool wait. The caller's thread builds the request and reads the response.
        """
        servers, prompt = self.servers, request.prompt
        check_length(request, self.sampling, servers.max_model_length)
        (part,) = generate_requests(request, self.sampling)
        if prompt not in self.media:
            self.media[prompt] = media_parts(part)
        future = self.pool.submit(servers.response_to, servers.body(part, self.media[prompt], self.sampling))

        def read(response: GenerateResponse) -> Group:
            label, tokenizer = version_label(servers.policy_version, servers.run), servers.renderer.processor.tokenizer
            sampled = to_completions(part, response, self.sampling, label, tokenizer)
            return request.group(sampled, servers.policy_version)

        return Submitted(future, read)


def media_parts(request: GenerateRequest) -> list[ContentPart]:
    """Return the images and the videos of a request's prompt. Each kind has its own placeholders, in order."""
    videos = [{"type": "video_url", "url": video_url(frames, metadata)} for frames, metadata in request.videos]
    return [*map(image_part, image_urls(request.sample)), *videos]


def image_part(url: str) -> ContentPart:
    """Return an image of a request."""
    return {"type": "image_url", "url": url}


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
