"""Upload an export to the Hugging Face hub."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rl_vlm.config.trl_objects import HUB, plain
from rl_vlm.errors import CheckpointError, ConfigError, shorten

STRATEGIES = (None, "end", "every_save")
"""Values of `hub_strategy`. `every_save` is TRL's default, and means `end` here."""


@dataclass(frozen=True)
class HubTarget:
    """A repository of the hub, and whether `train` pushes to it."""

    push_to_hub: bool = False
    hub_model_id: str | None = None
    """Name of the repository. Default: the name of the run's directory, in the account of the token."""
    hub_private_repo: bool | None = None
    hub_revision: str | None = None
    """Branch, which is created if there is none. Default: the main one."""
    hub_token: str | None = None
    """Default: the token that huggingface_hub finds."""

    def push(self, directory: Path, name: str, message: str) -> str:
        """Upload an export, and return the address of its repository. `name` is the name of the run's directory.

        Raises CheckpointError if the hub does not accept it.
        """
        from huggingface_hub import HfApi

        api = HfApi(endpoint=os.environ.get("HF_ENDPOINT"), token=self.hub_token)
        given = self.hub_model_id or name
        try:
            url = api.create_repo(given, private=self.hub_private_repo, exist_ok=True)
            if self.hub_revision:
                api.create_branch(url.repo_id, branch=self.hub_revision, exist_ok=True)
            api.upload_folder(
                repo_id=url.repo_id, folder_path=directory, commit_message=message, revision=self.hub_revision
            )
        except Exception as error:  # of the hub, or of one of several libraries for HTTP
            raise CheckpointError(
                f"{directory} could not be pushed to {given}: {shorten(error)}. Call push_to_hub() again, or run "
                f"`hf upload {given} {directory}`"
            ) from error
        return str(url)


def hub_target(fields: Mapping[str, Any]) -> HubTarget:
    """Return the target that fields of GRPOConfig name. Raises ConfigError for a strategy that is not here."""
    given = {name: value for name, value in fields.items() if value is not None}
    strategy = plain(given.pop(HUB[-1], None))
    if strategy not in STRATEGIES:
        raise ConfigError(f"`hub_strategy` is {strategy!r}: a run pushes its model once, at the end; write 'end'")
    return HubTarget(**given)
