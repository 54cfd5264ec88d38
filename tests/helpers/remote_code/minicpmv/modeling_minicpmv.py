"""Stand-in for MiniCPM-V 2.6's model: a small tower and resampler, and functions with the published arguments."""

import torch
from torch import nn
from transformers import Qwen2ForCausalLM, Qwen2PreTrainedModel

from .configuration_minicpm import MiniCPMVConfig


class MiniCPMVPreTrainedModel(Qwen2PreTrainedModel):
    config_class = MiniCPMVConfig


class MiniCPMV(MiniCPMVPreTrainedModel):
    def __init__(self, config):
        super().__init__(config)
        self.llm = Qwen2ForCausalLM(config)
        width = config.vision_config.hidden_size
        self.vpm = nn.Linear(3 * config.patch_size**2, width)
        self.resampler = nn.Linear(width, config.query_num * config.hidden_size)

    def get_vllm_embedding(self, data):
        if "vision_hidden_states" not in data:
            sizes, features = torch.vstack(data["tgt_sizes"]), []
            for slices in data["pixel_values"]:
                rows = []
                for pixels in slices:
                    height, width = sizes[len(rows)].tolist()
                    side = self.config.patch_size
                    patches = pixels.reshape(3, side, height * width, side).permute(2, 0, 1, 3).flatten(1)
                    assert patches.shape[0] == height * width
                    rows.append(self.resampler(torch.tanh(self.vpm(patches)).mean(0)))
                features.append(torch.stack(rows).view(len(rows), self.config.query_num, -1) if rows else [])
        else:
            features = data["vision_hidden_states"]
        embeddings = self.llm.model.embed_tokens(data["input_ids"])
        for i in range(len(data["input_ids"])):
            if len(features[i]) > 0 and len(data["image_bound"][i]) > 0:
                places = torch.stack([torch.arange(start, end) for start, end in data["image_bound"][i]])
                index = places.view(-1, 1).repeat(1, embeddings.shape[-1]).to(embeddings.device)
                embeddings[i].scatter_(0, index, features[i].view(-1, embeddings.shape[-1]))
        return embeddings, features

    def forward(self, data, **kwargs):
        embeddings, _ = self.get_vllm_embedding(data)
        position_ids = data["position_ids"]
        if position_ids.dtype != torch.int64:
            position_ids = position_ids.long()
        return self.llm(input_ids=None, position_ids=position_ids, inputs_embeds=embeddings, **kwargs)

    def chat(self, image, msgs, tokenizer, processor=None, **kwargs):
        raise AssertionError("training does not chat")
