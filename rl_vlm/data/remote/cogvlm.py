"""The code of CogVLM and CogVLM2 (`CogVLMForCausalLM`): prompts by the function of its model that builds them.

`build_conversation_input_ids` takes a question, earlier questions with their answers, and one image at most. Its text
does not depend on the image, whose tokens come after the first one.
"""

from __future__ import annotations

from typing import Any

import torch
from PIL.Image import Image

from rl_vlm.config.own_code import conversation_image_token, conversation_inputs
from rl_vlm.data.remote.chat import ChatProcessor


class CogVLMProcessor(ChatProcessor):
    """Calls the published function, with the checkpoint's template of questions and answers."""

    def __init__(self, tokenizer: Any, config: Any) -> None:
        super().__init__(tokenizer, image_processor=None)
        self.config = config
        self.chat_template = "template_version"
        """The name of the argument of the chat template, which `data.chat_template_kwargs` can set."""
        self.image_token_id = conversation_image_token(config, tokenizer)
        self.image_token = tokenizer.convert_ids_to_tokens(self.image_token_id)

    @staticmethod
    def load(path: str, config: Any, source: dict[str, Any]) -> CogVLMProcessor:
        """Load the tokenizer of a checkpoint, whose config is given. `source` are arguments of `from_pretrained`."""
        from transformers import AutoTokenizer

        return CogVLMProcessor(AutoTokenizer.from_pretrained(path, **source), config)

    def apply_chat_template(
        self, conversation: list[dict[str, Any]], tokenize: bool = False, return_dict: bool = False,
        return_tensors: str | None = None, template_version: str | None = None, **_: Any,
    ) -> Any:  # fmt: skip
        """Return a conversation as text, or with `tokenize` as the model's inputs. Its image blocks hold images.

        Raises ValueError if it does not end with a question of a user, or if it has several images.
        """
        texts, images = texts_of(conversation), images_of(conversation)
        history = list(zip(texts[:-1:2], texts[1::2], strict=True))
        given = {"query": texts[-1], "history": history, "template_version": template_version}
        if tokenize:
            return self.inputs(images, **given)
        reader = TextReader()
        conversation_inputs(self.config, reader, **given)
        return reader.text

    def __call__(self, text: list[str], images: list[Image] | None = None, **_: Any) -> Any:
        """Return the inputs of a rendered text. With an image, the text is a prompt, and its first token is added."""
        from transformers import BatchFeature

        if images:
            return self.inputs(images, query=text[0], template_version="base")
        ids = torch.tensor([self.tokenizer.encode(text[0], add_special_tokens=False)], dtype=torch.long)
        return BatchFeature({"input_ids": ids, "token_type_ids": torch.zeros_like(ids)})

    def inputs(self, images: list[Image], **given: Any) -> Any:
        """Return the model's inputs for a prompt, from the published function."""
        from transformers import BatchFeature

        shown = [image.convert("RGB") for image in images]
        found = conversation_inputs(self.config, self.tokenizer, images=shown or None, **given)
        features = {name: found[name][None] for name in ("input_ids", "token_type_ids")}
        return BatchFeature(features | ({"pixel_values": torch.stack(list(found["images"]))} if shown else {}))


class TextReader:
    """Takes the place of a tokenizer, to read the text that the published function would encode."""

    bos_token_id = eos_token_id = pad_token_id = 0
    text = ""

    def encode(self, text: str, **_: Any) -> list[int]:
        """Keep the text, and return no tokens."""
        self.text = text
        return []


def texts_of(conversation: list[dict[str, Any]]) -> list[str]:
    """Return questions and answers in turn. Raises ValueError if there are other messages, or no last question."""
    roles = [message["role"] for message in conversation]
    if len(roles) % 2 == 0 or any(role != ("user", "assistant")[i % 2] for i, role in enumerate(roles)):
        raise ValueError(
            f"CogVLM's code builds prompts of questions (user) and answers (assistant) in turn, with a question last, "
            f"and these messages are of {', '.join(roles)}. A system message can be a part of the first question"
        )
    return ["".join(block.get("text", "") for block in message["content"]) for message in conversation]


def images_of(conversation: list[dict[str, Any]]) -> list[Image]:
    """Return the image of a conversation, if it has one. Raises ValueError if it has several."""
    found = [block["image"] for message in conversation for block in message["content"] if block["type"] == "image"]
    if len(found) > 1:
        raise ValueError(f"CogVLM's code takes one image per prompt, and this one has {len(found)}")
    return found
