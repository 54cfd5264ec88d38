"""The short campaign of `make chaos`: two ranks that are killed, stopped or sent a signal, each resumed bitwise."""

import subprocess
import sys

import pytest

from tests.chaos.campaign import read, short_trials
from tests.chaos.trials import KINDS, all_trials
from tests.helpers.two_processes import REPOSITORY


def test_the_campaign_has_every_trial_once():
    keys = [trial.key for trial in all_trials()]
    assert len(keys) == len(set(keys)) == 50 + 50 + 30 + 10 + 20 + 10 + 10
    assert {trial.kind for trial in all_trials()[:20]} == set(KINDS)


@pytest.mark.slow
def test_some_trials(tmp_path):
    state, options = tmp_path / "state.jsonl", ["--directory", str(tmp_path / "runs")]
    command = [sys.executable, "-m", "tests.chaos.campaign", "--short", "--state", str(state), *options]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    assert len(read(state)) == len(short_trials()) == 11
