"""The upload of a directory to a stand-in of the hub, and fields about the hub."""

import pytest
from transformers.trainer_utils import HubStrategy

from rl_vlm.errors import CheckpointError, ConfigError
from rl_vlm.tools.export.push import HubTarget, hub_target
from tests.helpers.hub_server import hub_server


def test_a_directory_is_uploaded_in_one_commit(tmp_path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "README.md").write_text("A card.")
    target = HubTarget(True, "owner/mine", hub_private_repo=True, hub_revision="next", hub_token="hf_secret")
    with hub_server() as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        assert target.push(tmp_path, "run", "After 3 steps") == f"{hub.url}/owner/mine"
        assert HubTarget(hub_token="hf_secret").push(tmp_path, "run", "Again") == f"{hub.url}/me/run"
    assert hub.repositories == {"owner/mine": "private", "me/run": None} and hub.branches == ["next"]
    assert hub.commits == [
        ("/api/models/owner/mine/commit/next", "After 3 steps", {"README.md": b"A card."}),
        ("/api/models/me/run/commit/main", "Again", {"README.md": b"A card."}),
    ]
    assert hub.tokens == {"Bearer hf_secret"}


def test_a_hub_that_does_not_answer(tmp_path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(
        CheckpointError, match=r"could not be pushed to a/b: .*Call push_to_hub\(\) again, or run `hf upl"
    ):
        HubTarget(hub_model_id="a/b", hub_token="hf_secret").push(tmp_path, "run", "message")


def test_fields_about_the_hub():
    fields = {"push_to_hub": True, "hub_model_id": "a/b", "hub_token": None, "hub_strategy": HubStrategy.EVERY_SAVE}
    assert hub_target(fields) == HubTarget(True, "a/b") and hub_target({}) == HubTarget()
    with pytest.raises(ConfigError, match="`hub_strategy` is 'checkpoint': a run pushes its model once, at the end"):
        hub_target({"hub_strategy": HubStrategy.CHECKPOINT})
