"""Plugin of a vLLM server: the routes that a trainer needs, protected by a token.

vLLM's server loads the routes as an endpoint plugin, and the token check as a middleware, by their names. Most routes
are vLLM's own, for its weight-transfer API and its caches. Without this plugin they need vLLM's development mode, which
also lets anyone run code and requires no token.
"""

from __future__ import annotations

import os
import secrets
import signal
import sys
import threading
from typing import TYPE_CHECKING, Any

from rl_vlm.rollout.vllm.client import TOKEN

if TYPE_CHECKING:
    from fastapi import FastAPI
    from starlette.requests import Request
    from starlette.responses import JSONResponse

LIFELINE = "RL_VLM_SERVER_ENDS_WITH_STDIN"


class TrainerRoutes:
    """Endpoint plugin of vLLM that adds the routes."""

    name = "rl_vlm"
    required_tasks = ("generate",)

    def attach_router(self, app: FastAPI) -> None:
        from vllm.entrypoints.rl.online.api_router import router as weights
        from vllm.entrypoints.serve.dev.cache.api_router import router as caches

        app.include_router(weights)
        app.include_router(caches)
        app.add_route("/rl_vlm/setup", setup, methods=["GET"])

    async def init_state(self, engine_client: Any, state: Any, args: Any) -> None:
        if os.environ.get(LIFELINE):
            threading.Thread(target=end_with_stdin, daemon=True).start()


async def setup(request: Request) -> JSONResponse:
    """Return the settings that must be the same in the trainer."""
    from starlette.responses import JSONResponse

    config = request.app.state.engine_client.vllm_config
    model, lora = config.model_config, config.lora_config
    facts = {
        "model_type": model.hf_config.model_type,
        "dtype": str(model.dtype).removeprefix("torch."),
        "max_model_len": model.max_model_len,
        "mm_processor_kwargs": model.multimodal_config.mm_processor_kwargs if model.multimodal_config else None,
        "logprobs_mode": model.logprobs_mode,
        "max_lora_rank": lora.max_lora_rank if lora else None,
        "weight_transfer": config.weight_transfer_config.backend if config.weight_transfer_config else None,
    }
    return JSONResponse(facts)


def end_with_stdin() -> None:
    """Terminate this server when standard input closes. It closes if the trainer is killed."""
    sys.stdin.read()
    os.kill(os.getpid(), signal.SIGTERM)


class RequireToken:
    """ASGI middleware that requires the token on all paths but `/health`."""

    def __init__(self, app: Any) -> None:
        self.app = app
        self.expected = f"Bearer {os.environ[TOKEN]}".encode()

    async def __call__(self, scope: dict[str, Any], receive: Any, send: Any) -> None:
        if scope["type"] in ("http", "websocket") and scope["path"] != "/health":
            given = dict(scope["headers"]).get(b"authorization", b"")
            if not secrets.compare_digest(given, self.expected):
                await send({"type": "http.response.start", "status": 401, "headers": []})
                await send({"type": "http.response.body", "body": b"wrong or no token"})
                return
        await self.app(scope, receive, send)
