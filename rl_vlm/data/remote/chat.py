"""A processor around a tokenizer's chat template, which knows no images."""

from __future__ import annotations

from typing import Any


class ChatProcessor:
    """Renders conversations with a tokenizer, as transformers' processors do. Image blocks become `image_text`."""

    image_token: str
    """The token that stands for image features."""
    image_text: str
    """The text of an image block."""

    def __init__(self, tokenizer: Any, image_processor: Any) -> None:
        self.tokenizer = tokenizer
        self.image_processor = image_processor
        self.chat_template = tokenizer.chat_template

    def apply_chat_template(
        self, conversation: list[dict[str, Any]], tokenize: bool = False, return_dict: bool = False,
        return_tensors: str | None = None, **template: Any,
    ) -> Any:  # fmt: skip
        """Return a conversation as text, or with `tokenize` as the model's inputs. Its image blocks hold images."""
        texts = [each | {"content": "".join(map(self.text_of, each["content"]))} for each in conversation]
        text = self.tokenizer.apply_chat_template(texts, tokenize=False, **template)
        images = [block["image"] for each in conversation for block in each["content"] if block["type"] == "image"]
        return self(text=[text], images=images) if tokenize else text

    def text_of(self, block: dict[str, Any]) -> str:
        """Return the text of one block of a message."""
        return self.image_text if block["type"] == "image" else block["text"]

    def __call__(self, text: list[str], images: list[Any] | None = None, **_: Any) -> Any:
        """Return the model's inputs for one text with one `image_text` per image."""
        raise NotImplementedError

    def tokens(self, text: str) -> Any:
        """Return the token ids of a rendered conversation. The chat template has added special tokens."""
        from transformers import BatchFeature

        return BatchFeature(dict(self.tokenizer(text, add_special_tokens=False, return_tensors="pt")))

    def save_pretrained(self, directory: Any) -> None:
        """Write the tokenizer. The other settings are in the model's config."""
        self.tokenizer.save_pretrained(directory)
