"""Stand-in for MiniCPM-V 2.6's processor."""

import re

import torch
from transformers import BatchFeature
from transformers.processing_utils import ProcessorMixin


class MiniCPMVProcessor(ProcessorMixin):
    attributes = ["image_processor", "tokenizer"]  # noqa: RUF012
    image_processor_class = "AutoImageProcessor"
    tokenizer_class = "AutoTokenizer"

    def __init__(self, image_processor=None, tokenizer=None):
        super().__init__(image_processor, tokenizer)

    def __call__(
        self,
        text,
        images=None,
        max_length=None,
        do_pad=True,
        max_slice_nums=None,
        use_image_id=None,
        return_tensors="pt",
        **kwargs,
    ):
        found = self.image_processor.preprocess(images, do_pad=do_pad, max_slice_nums=max_slice_nums)
        pattern = r"\(<image>./</image>\)"
        rows = []
        for row, sizes in zip(text, found["image_sizes"], strict=True):
            chunks = re.split(pattern, row)
            assert len(chunks) == len(sizes) + 1
            marks = [self.image_processor.get_slice_image_placeholder(size, i) for i, size in enumerate(sizes)]
            whole = "".join(chunk + mark for chunk, mark in zip(chunks, [*marks, ""], strict=True))
            rows.append(self.tokenizer.encode(whole))
        ids = torch.tensor(rows)
        return BatchFeature({"input_ids": ids, "attention_mask": ids != -1, **found, "image_bound": [[]]})
