"""`rl-vlm chat` as a process: what it prints, and how it ends."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from launch import cli
from tests.helpers.builders import noise_image, sharp_checkpoint
from tests.helpers.chat_client import chat, fetch, question, write_run

ROOT = Path(__file__).parents[2]
COMMAND = [sys.executable, "-c", "from launch import cli; cli.command()", "chat"]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run whose completions seldom end before their limit."""
    folder = tmp_path_factory.mktemp("runs")
    return write_run(sharp_checkpoint("qwen2_5_vl", folder / "model"), folder / "tiny", max_pixels=1024)


@contextmanager
def started(*arguments: str) -> Iterator[tuple[subprocess.Popen[str], str, str]]:
    """The process once it answers, what it has printed, and its base URL."""
    command = [*COMMAND, *arguments, "--port", "0"]
    process = subprocess.Popen(command, cwd=ROOT, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    try:
        assert process.stdout is not None
        printed = ""
        for line in process.stdout:
            printed += line
            if line.startswith("  model "):
                break
        (url,) = [line.split()[-1] for line in printed.splitlines() if "base URL" in line]
        yield process, printed, url
    finally:
        process.kill()
        process.communicate()


def children(pid: int) -> list[int]:
    """Processes whose parent is `pid`."""
    found = []
    for status in Path("/proc").glob("[0-9]*/stat"):
        try:
            if int(status.read_text().rpartition(")")[2].split()[1]) == pid:
                found.append(int(status.parent.name))
        except OSError:  # it has ended
            continue
    return found


@pytest.mark.parametrize(
    ("number", "status"), [(signal.SIGTERM, 143), pytest.param(signal.SIGINT, 130, marks=pytest.mark.slow)]
)
def test_a_signal_ends_it_after_an_answer_to_every_request(number, status, run):
    with started(str(run), "--served-model-name", "tiny") as (process, printed, url):
        assert f"max_pixels             1024           ({run / 'config.yaml'})" in printed
        assert printed.splitlines()[0].startswith(f"{run / 'checkpoint-4'} answers with engine hf")
        proven = [line.split()[0] for line in printed.partition("on this device:\n")[2].splitlines()]
        assert proven == ["holds"] * 6 + ["A", "base", "model"]
        assert chat(url, question(noise_image(16, 16, 0)))["usage"]["prompt_tokens"] > 4

        statuses: list[int] = []
        body: dict[str, Any] = {"model": "tiny", "messages": question(), "n": 128, "max_tokens": 3000, "temperature": 1}
        long = json.dumps(body).encode()

        def ask_long() -> None:
            statuses.append(fetch(f"{url}/chat/completions", long)[0])

        asks = [threading.Thread(target=ask_long) for _ in range(2)]
        for ask in asks:
            ask.start()
        time.sleep(1.0)
        born = children(process.pid)
        process.send_signal(number)
        for ask in asks:
            ask.join()
        assert statuses == [503, 503]
        assert process.wait(20) == status
        assert [pid for pid in born if Path(f"/proc/{pid}").exists()] == []


def test_problems_are_messages_with_status_2(run, tmp_path, capsys):
    assert cli.main(["chat", str(tmp_path)]) == 2
    assert f"rl-vlm chat {tmp_path} failed:" in capsys.readouterr().err
    assert cli.main(["chat", str(run), "learning_rate=1"]) == 2
    assert "train.learning_rate: no effect" in capsys.readouterr().err


def test_a_port_in_use_is_said_before_the_model_is_loaded(run, capsys):
    handlers = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        assert cli.main(["chat", str(run), "--port", str(port)]) == 2
    assert f"port {port} of 127.0.0.1 cannot be used" in capsys.readouterr().err
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == handlers


def test_help_needs_no_torch():
    program = (
        "import sys; from launch.cli import main\n"
        "try: main(['chat', '--help'])\n"
        "except SystemExit as stop: assert stop.code == 0 and 'torch' not in sys.modules"
    )
    result = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True)
    assert (result.returncode, "CHECKPOINT" in result.stdout) == (0, True)
