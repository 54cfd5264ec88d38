"""How often vLLM evicts sequences, by what servers write."""

from typing import Any

from rl_vlm.errors import RolloutError
from rl_vlm.rollout.vllm.client import ServerLost, VLLMClient
from rl_vlm.rollout.vllm.preemptions import Preemptions, total_in_text, totals_of_servers

TEXT = """\
# HELP vllm:num_preemptions_total Cumulative number of preemption from the engine.
# TYPE vllm:num_preemptions_total counter
vllm:num_preemptions_total{engine="0",model_name="Qwen/Qwen2.5-VL-7B-Instruct"} 12.0
vllm:num_preemptions_total{engine="1",model_name="a name 7"} 1.0e+02
# HELP vllm:num_preemptions_created Cumulative number of preemption from the engine.
# TYPE vllm:num_preemptions_created gauge
vllm:num_preemptions_created{engine="0",model_name="Qwen/Qwen2.5-VL-7B-Instruct"} 1.7640000e+09
vllm:request_num_preemptions_sum{engine="0",model_name="Qwen/Qwen2.5-VL-7B-Instruct"} 5.0
"""


class Server(VLLMClient):
    """Answers /metrics with a text, or raises."""

    def __init__(self, name: str, answer: Any) -> None:
        super().__init__(f"http://{name}", "token", 1.0)
        self.answer = answer

    def get(self, path: str) -> Any:
        assert path == "/metrics"
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer


def test_the_counter_is_added_up_over_a_servers_engines():
    assert total_in_text(TEXT) == 112
    assert total_in_text("vllm:num_preemptions_total 3.0\n") == 3


def test_servers_without_the_counter_are_left_out():
    servers = [
        Server("a", TEXT), Server("b", ServerLost("gone")), Server("c", RolloutError("404")), Server("d", None),
        Server("e", {}), Server("f", "python_gc_objects 3.0"),
    ]  # fmt: skip
    assert totals_of_servers(servers) == {"http://a": 112}


def test_preemptions_since_the_last_reading_are_counted_and_the_first_warned_of(caplog):
    preemptions = Preemptions({"a": 5})
    assert preemptions.new({"a": 5, "b": 0}) == 0
    assert caplog.records == []
    assert preemptions.new({"a": 7, "b": 3}) == 5
    (line,) = [record.getMessage() for record in caplog.records]
    assert "evicted sequences 5 times" in line
    assert "Raise vllm.vllm_gpu_memory_utilization, or lower rollout.max_num_seqs" in line
    assert preemptions.new({"b": 4}) == 1  # a gives none this time
    assert preemptions.new({"a": 8, "b": 4}) == 1
    assert preemptions.new({"a": 2, "b": 4}) == 2  # a was started again
    assert len(caplog.records) == 1
