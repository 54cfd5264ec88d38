"""The reward model, against the same model's forward called by hand."""

import pytest
import torch
from PIL import Image
from transformers import (
    AutoModelForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen2ForSequenceClassification,
)

from rewards.judges.reward_model import load, reward_model
from rl_vlm.tiny.tokenizer import CHAT_TOKENS, DEFAULT_CORPUS, train_tokenizer

TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
PROMPT = [{"role": "user", "content": "Which digit is this?"}]
TEXTS = ["7", "The answer is seven, because it has one loop and a long tail.", ""]


def config(**changes) -> Qwen2Config:
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "vocab_size": 400}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1}
    return Qwen2Config(**{**sizes, **heads, "pad_token_id": 0, "num_labels": 1, **changes})


def saved(
    folder, make: type[PreTrainedModel] = Qwen2ForSequenceClassification, template: str | None = TEMPLATE, **changes
) -> str:
    """A tiny checkpoint with a tokenizer."""
    torch.manual_seed(0)
    make(config(**changes)).save_pretrained(folder)
    tokenizer = train_tokenizer(DEFAULT_CORPUS, [])
    tokenizer.chat_template = template
    tokenizer.save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> str:
    return saved(tmp_path_factory.mktemp("reward_model"))


def by_hand(checkpoint: str, *texts: str, last: int = 10_000) -> list[float]:
    """Logits of whole conversations as texts, one at a time."""
    model = Qwen2ForSequenceClassification.from_pretrained(checkpoint).eval()
    tokenizer = train_tokenizer(DEFAULT_CORPUS, [])
    ids = [tokenizer(text, add_special_tokens=False)["input_ids"][-last:] for text in texts]
    with torch.no_grad():
        return [model(input_ids=torch.tensor([row])).logits.item() for row in ids]


def chat(text: str, question: str = "Which digit is this?") -> str:
    start, end = CHAT_TOKENS[1:]
    return f"{start}user\n{question}{end}{start}assistant\n{text}{end}"


@pytest.mark.parametrize("batch_size", [1, 2, 3])
def test_scores_are_the_logits_of_each_conversation(checkpoint, batch_size):
    scores = reward_model(TEXTS, [PROMPT] * 3, model=checkpoint, device="cpu", batch_size=batch_size)
    assert scores == pytest.approx(by_hand(checkpoint, *map(chat, TEXTS)), abs=1e-6)
    assert len(set(scores)) == 3


def test_the_sigmoid(checkpoint):
    logits = torch.tensor(by_hand(checkpoint, *map(chat, TEXTS)))
    scores = reward_model(TEXTS, [PROMPT] * 3, model=checkpoint, device="cpu", sigmoid=True)
    assert scores == pytest.approx((1 / (1 + (-logits).exp())).tolist(), abs=1e-6)


def test_both_forms_and_images_are_read_as_their_text(checkpoint):
    blocks = [{"type": "image", "image": Image.new("RGB", (2, 2))}, {"type": "text", "text": PROMPT[0]["content"]}]
    prompts = ["Which digit is this?", PROMPT, [{"role": "user", "content": blocks}]]
    completions = ["7", [{"role": "assistant", "content": "7"}], "7"]
    scores = reward_model(completions, prompts, model=checkpoint, device="cpu")
    assert scores == pytest.approx(by_hand(checkpoint, chat("7")) * 3, abs=1e-6)


def test_a_completion_continues_the_message_of_an_assistant(checkpoint):
    prompt = [*PROMPT, {"role": "assistant", "content": "The answer"}]
    scores = reward_model([" is 7"], [prompt], model=checkpoint, device="cpu")
    assert scores == pytest.approx(by_hand(checkpoint, chat("The answer is 7")), abs=1e-6)


def test_the_last_tokens_of_a_long_conversation_are_read(checkpoint):
    scores = reward_model(["7 " * 50_000], [PROMPT], model=checkpoint, device="cpu", max_length=20)
    assert scores == pytest.approx(by_hand(checkpoint, chat("7 " * 50_000), last=20), abs=1e-6)


def test_a_model_without_a_padding_token_reads_one_conversation_at_a_time(tmp_path):
    checkpoint = saved(tmp_path, pad_token_id=None)
    scores = reward_model(TEXTS, [PROMPT] * 3, model=checkpoint, device="cpu")
    assert scores == pytest.approx(by_hand(checkpoint, *map(chat, TEXTS)), abs=1e-6)


def test_the_model_is_loaded_once(checkpoint):
    reward_model(["7"], [PROMPT], model=checkpoint, device="cpu")
    assert load(checkpoint, "cpu").model is load(checkpoint, "cpu").model
    assert not load(checkpoint, "cpu").model.training


def test_what_is_no_reward_model_is_refused(tmp_path):
    language_model = saved(tmp_path / "lm", Qwen2ForCausalLM)
    assert AutoModelForCausalLM.from_pretrained(language_model)
    two_logits = saved(tmp_path / "two", num_labels=2)
    no_template = saved(tmp_path / "no_template", template=None)
    for folder, problem in [
        (language_model, "its checkpoint has no score.weight"),
        (two_logits, "has 2 logits"),
        (no_template, "has no chat template"),
    ]:
        with pytest.raises(ValueError, match=problem):
            reward_model(["7"], [PROMPT], model=folder, device="cpu")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({}, "needs `model`"),
        ({"model": "x", "batch_size": 0}, "batch_size=0"),
        ({"model": "x", "max_length": 0}, "max_length=0"),
        ({"model": "x", "device": "tpu"}, "device='tpu'"),
    ],
)
def test_settings_without_a_meaning_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        reward_model(["7"], [PROMPT], **settings)


def test_lone_surrogates_become_question_marks(checkpoint):
    scores = reward_model(["7\ud800", "7?"], [PROMPT] * 2, model=checkpoint, device="cpu")
    assert scores[0] == pytest.approx(scores[1])
