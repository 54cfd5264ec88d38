"""Stand-in for InternVL's model: a small tower, and functions with the published names and arguments."""

from typing import Any

from torch import nn
from transformers import PreTrainedModel, Qwen2ForCausalLM
from transformers.modeling_outputs import CausalLMOutputWithPast

from .configuration_internvl_chat import InternVLChatConfig


class InternVisionModel(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.patch_embedding = nn.Conv2d(3, config.hidden_size, config.patch_size, config.patch_size)
        self.mlp = nn.Sequential(nn.Linear(config.hidden_size, 64), nn.GELU(), nn.Linear(64, config.hidden_size))

    def forward(self, pixel_values):
        patches = self.patch_embedding(pixel_values).flatten(2).transpose(1, 2)
        return patches + self.mlp(patches)


class InternVLChatModel(PreTrainedModel):
    config_class = InternVLChatConfig
    main_input_name = "pixel_values"
    base_model_prefix = "language_model"
    _supports_sdpa = True

    def __init__(self, config, vision_model=None, language_model=None, use_flash_attn=True):
        super().__init__(config)
        self.downsample_ratio = config.downsample_ratio
        self.vision_model = vision_model or InternVisionModel(config.vision_config)
        self.language_model = language_model or Qwen2ForCausalLM(config.llm_config)
        width = config.vision_config.hidden_size * int(1 / config.downsample_ratio) ** 2
        hidden = config.llm_config.hidden_size
        self.mlp1 = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, hidden), nn.GELU(), nn.Linear(hidden, hidden))
        self.img_context_token_id = None

    def forward(
        self,
        pixel_values,
        input_ids: Any = None,
        attention_mask=None,
        position_ids=None,
        image_flags: Any = None,
        past_key_values=None,
        labels=None,
        use_cache=None,
        output_attentions=None,
        output_hidden_states=None,
        return_dict=None,
    ):
        image_flags = image_flags.squeeze(-1)
        embeds = self.language_model.get_input_embeddings()(input_ids).clone()
        features = self.extract_feature(pixel_values)[image_flags == 1]
        shape = embeds.shape
        embeds = embeds.reshape(-1, shape[-1])
        selected = input_ids.reshape(-1) == self.img_context_token_id
        embeds[selected] = embeds[selected] * 0.0 + features.reshape(-1, shape[-1])
        outputs = self.language_model(
            inputs_embeds=embeds.reshape(shape),
            attention_mask=attention_mask,
            position_ids=position_ids,
            past_key_values=past_key_values,
            use_cache=use_cache,
            output_attentions=output_attentions,
            output_hidden_states=output_hidden_states,
            return_dict=return_dict,
        )
        return CausalLMOutputWithPast(logits=outputs.logits, past_key_values=outputs.past_key_values)

    def extract_feature(self, pixel_values):
        patches = self.vision_model(pixel_values)
        tiles, num, width = patches.shape
        side, cell = int(num**0.5), int(1 / self.downsample_ratio)
        cells = patches.view(tiles, side // cell, cell, side // cell, cell, width).transpose(2, 3)
        return self.mlp1(cells.reshape(tiles, -1, cell * cell * width))

    def chat(self, tokenizer, pixel_values, question, generation_config, history=None, num_patches_list=None):
        raise AssertionError("training does not chat")
