"""Stand-in for CogVLM2's model: experts by token type, positions that an image shares, and caches of tuples."""

from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from transformers import PreTrainedModel
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast

from .configuration_cogvlm import CogVLMConfig
from .visual import EVA2CLIPModel

LANGUAGE_TOKEN_TYPE = 0
VISION_TOKEN_TYPE = 1


def get_expert_mask(token_type_ids):
    """Tokens of an image, but for the last one."""
    is_vision = token_type_ids == VISION_TOKEN_TYPE
    mask = is_vision & F.pad(is_vision, (0, 1))[:, 1:]
    return mask, ~mask


def build_position_ids(x, attention_mask=None):
    """Each token steps on by one, but for those inside of an image after the first of them."""
    is_real = torch.ones_like(x, dtype=torch.bool) if attention_mask is None else attention_mask.bool()
    is_vision = (x == VISION_TOKEN_TYPE) & is_real
    sides = F.pad(is_vision, (1, 1))
    inside = is_vision & sides[:, :-2] & sides[:, 2:]
    steps = is_real & ~(inside & F.pad(inside, (1, 0))[:, :-1])
    steps[:, 0] = False
    return steps.long().cumsum(-1)


def routed(hidden, token_type_ids, vision, language, width):
    """Products of the experts, in a tensor of the input's dtype, as the published layers make it."""
    is_vision, is_language = get_expert_mask(token_type_ids)
    output = torch.empty(*hidden.shape[:-1], width, dtype=hidden.dtype, device=hidden.device)
    output[is_vision] = vision(hidden[is_vision])
    output[is_language] = language(hidden[is_language])
    return output


def rotated(states, position_ids):
    """Rotary embeddings of (rows, heads, tokens, dim)."""
    half = states.shape[-1] // 2
    speeds = 10000.0 ** (-torch.arange(half, device=states.device) / half)
    angles = position_ids[:, None, :, None] * speeds
    cos, sin = angles.cos().to(states.dtype), angles.sin().to(states.dtype)
    a, b = states[..., :half], states[..., half:]
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)


class RMSNorm(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(config.hidden_size))
        self.eps = config.rms_norm_eps

    def forward(self, hidden):
        found = hidden.float() * torch.rsqrt(hidden.float().square().mean(-1, keepdim=True) + self.eps)
        return (self.weight * found).to(hidden.dtype)


class MLP(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x):
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class VisionExpertMLP(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.language_mlp = MLP(config)
        self.vision_mlp = MLP(config)

    def forward(self, hidden, token_type_ids):
        return routed(hidden, token_type_ids, self.vision_mlp, self.language_mlp, hidden.shape[-1])


class VisionExpertAttention(nn.Module):
    def __init__(self, config):
        super().__init__()
        width, heads, kv_heads = config.hidden_size, config.num_attention_heads, config.num_multi_query_heads
        self.heads, self.kv_heads, self.head_dim = heads, kv_heads, width // heads
        self.qkv_size = width + 2 * kv_heads * self.head_dim
        self.vision_expert_query_key_value = nn.Linear(width, self.qkv_size, bias=True)
        self.vision_expert_dense = nn.Linear(width, width, bias=False)
        self.language_expert_query_key_value = nn.Linear(width, self.qkv_size, bias=False)
        self.language_expert_dense = nn.Linear(width, width, bias=False)

    def forward(self, hidden, token_type_ids, position_ids, attention_mask, past_key_value=None, use_cache=False):
        mixed = routed(
            hidden, token_type_ids, self.vision_expert_query_key_value, self.language_expert_query_key_value,
            self.qkv_size,
        )  # fmt: skip
        by_head = mixed.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
        query, key, value = by_head.split([self.heads, self.kv_heads, self.kv_heads], dim=1)
        query, key = rotated(query, position_ids), rotated(key, position_ids)
        if past_key_value is not None:
            key = torch.cat([past_key_value[0], key], dim=2)
            value = torch.cat([past_key_value[1], value], dim=2)
        present = (key, value) if use_cache else None
        key, value = (each.repeat_interleave(self.heads // self.kv_heads, dim=1) for each in (key, value))
        scores = query @ key.transpose(-1, -2) / self.head_dim**0.5 + attention_mask
        context = scores.softmax(-1, dtype=torch.float32).to(query.dtype) @ value
        context = context.transpose(1, 2).flatten(2).to(hidden.dtype)
        output = routed(
            context, token_type_ids, self.vision_expert_dense, self.language_expert_dense, context.shape[-1]
        )
        return output, present


class CogVLMDecoderLayer(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.self_attn = VisionExpertAttention(config)
        self.mlp = VisionExpertMLP(config)
        self.input_layernorm = RMSNorm(config)
        self.post_attention_layernorm = RMSNorm(config)

    def forward(self, hidden, token_type_ids, position_ids, attention_mask, past_key_value, use_cache):
        attended, present = self.self_attn(
            self.input_layernorm(hidden), token_type_ids, position_ids, attention_mask, past_key_value, use_cache
        )
        hidden = hidden + attended
        return hidden + self.mlp(self.post_attention_layernorm(hidden), token_type_ids), present


class CogVLMPreTrainedModel(PreTrainedModel):
    config_class = CogVLMConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = False
    _no_split_modules = ["CogVLMDecoderLayer"]  # noqa: RUF012

    def _init_weights(self, module):
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.normal_(module.weight, std=self.config.initializer_range)
            bias: Any = getattr(module, "bias", None)
            if bias is not None:
                nn.init.zeros_(bias)


class CogVLMModel(CogVLMPreTrainedModel):
    def __init__(self, config):
        super().__init__(config)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList([CogVLMDecoderLayer(config) for _ in range(config.num_hidden_layers)])
        self.norm = RMSNorm(config)
        self.vision = EVA2CLIPModel(config)
        self.post_init()

    def encode_images(self, images):
        return self.vision(torch.stack([image for row in images for image in row]))

    def forward(
        self,
        input_ids=None,
        images=None,
        token_type_ids=None,
        attention_mask=None,
        position_ids=None,
        past_key_values=None,
        inputs_embeds=None,
        use_cache=None,
        output_attentions=None,
        output_hidden_states=None,
        return_dict=None,
    ):
        if past_key_values is None:
            assert input_ids is not None and inputs_embeds is None
            inputs_embeds = self.embed_tokens(input_ids)
            if images and any(len(row) for row in images):
                assert len(input_ids) == len(images)
                features = self.encode_images(images).flatten(0, 1).to(inputs_embeds)
                inputs_embeds = inputs_embeds.index_put([token_type_ids == VISION_TOKEN_TYPE], features)
            else:
                token_type_ids = torch.zeros_like(input_ids) if token_type_ids is None else token_type_ids
                assert not (token_type_ids == VISION_TOKEN_TYPE).any()
            if position_ids is None:
                position_ids = build_position_ids(token_type_ids, attention_mask)
            input_ids = None
        return self.llm_forward(
            input_ids, token_type_ids, attention_mask, position_ids, past_key_values, inputs_embeds, use_cache
        )

    def llm_forward(
        self,
        input_ids=None,
        token_type_ids=None,
        attention_mask=None,
        position_ids: Any = None,
        past_key_values=None,
        inputs_embeds=None,
        use_cache=None,
        output_attentions=None,
        output_hidden_states=None,
        return_dict=None,
    ):
        hidden = self.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds
        num_past = 0 if past_key_values is None else past_key_values[0][0].shape[2]
        num, num_new = hidden.shape[1] + num_past, hidden.shape[1]
        if attention_mask is None:
            attention_mask = torch.ones(len(hidden), num, dtype=torch.bool, device=hidden.device)
        allowed = torch.ones(num_new, num, dtype=torch.bool, device=hidden.device).tril(num_past)
        allowed = allowed & attention_mask[:, None, None].bool()
        mask = torch.zeros_like(allowed, dtype=hidden.dtype).masked_fill(~allowed, torch.finfo(hidden.dtype).min)
        caches: Any = ()
        for i, layer in enumerate(self.layers):
            past = None if past_key_values is None else past_key_values[i]
            hidden, present = layer(hidden, token_type_ids, position_ids.view(-1, num_new), mask, past, use_cache)
            caches += (present,)
        return BaseModelOutputWithPast(
            last_hidden_state=self.norm(hidden), past_key_values=caches if use_cache else None
        )


class CogVLMForCausalLM(CogVLMPreTrainedModel):
    _auto_class = "AutoModelForCausalLM"

    def __init__(self, config):
        super().__init__(config)
        self.model = CogVLMModel(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def get_input_embeddings(self):
        return self.model.embed_tokens

    def get_output_embeddings(self):
        return self.lm_head

    def get_decoder(self):
        return self.model

    def forward(
        self,
        input_ids=None,
        images=None,
        token_type_ids=None,
        attention_mask=None,
        position_ids=None,
        past_key_values=None,
        inputs_embeds=None,
        use_cache=None,
        output_attentions=None,
        output_hidden_states=None,
        return_dict=None,
        labels=None,
    ):
        outputs = self.model(
            input_ids=input_ids, images=images, token_type_ids=token_type_ids, attention_mask=attention_mask,
            position_ids=position_ids, past_key_values=past_key_values, inputs_embeds=inputs_embeds,
            use_cache=use_cache,
        )  # fmt: skip
        logits = self.lm_head(outputs[0]).float()
        return CausalLMOutputWithPast(logits=logits, past_key_values=outputs.past_key_values)

    def build_conversation_input_ids(
        self, tokenizer, *, query, history=None, images=None, template_version=None, answer=None
    ):
        sizes = self.config.vision_config
        version = template_version or self.config.template_version
        assert images is None or len(images) <= 1
        ends = {"chat": "Answer:", "vqa": "Short answer:"}
        parts = [f"Question: {old} {ends[version]} {response}\n" for old, response in history or []]
        text = query if version == "base" else "".join(parts) + f"Question: {query} {ends[version]}"
        input_ids, token_type_ids = [tokenizer.bos_token_id], [LANGUAGE_TOKEN_TYPE]
        if images:
            side = sizes["image_size"]
            values = np.asarray(images[0].resize((side, side)), dtype=np.float32) / 127.5 - 1
            images = [torch.from_numpy(values).permute(2, 0, 1)]
            num = (side // sizes["patch_size"] // 2) ** 2 + 2
            tokenizer.pad_token_id = sizes["pad_token_id"]  # the published code has the number of its own tokenizer
            input_ids += [tokenizer.pad_token_id] * num
            token_type_ids += [VISION_TOKEN_TYPE] * num
        text_ids = tokenizer.encode(text, add_special_tokens=False)
        input_ids += text_ids
        token_type_ids += [LANGUAGE_TOKEN_TYPE] * len(text_ids)
        return {
            "input_ids": torch.tensor(input_ids),
            "token_type_ids": torch.tensor(token_type_ids),
            "attention_mask": torch.ones(len(input_ids), dtype=torch.long),
            "images": images,
            "labels": None,
        }
