"""Writes tiny checkpoints whose code is one of the stand-ins in this folder."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoConfig

from rl_vlm.config.own_code import auto_name
from rl_vlm.tiny.family import chat_template, layer_sizes
from rl_vlm.tiny.tokenizer import DEFAULT_CORPUS, train_tokenizer

HERE = Path(__file__).parent
SPECIAL_TOKENS = {
    "internvl_chat": ("<img>", "</img>", "<IMG_CONTEXT>"),
    "minicpmv": ("<unk>", "<image>", "</image>", "<slice>", "</slice>"),
    "cogvlm": ("<|begin_of_text|>", "<|reserved_special_token_0|>"),
}
HIDDEN = 64


def build_remote(kind: str, directory: Path) -> Path:
    """Write a random tiny checkpoint of a kind, which loads with `trust_remote_code` alone."""
    directory.mkdir(exist_ok=True, parents=True)
    for path in (HERE / kind).glob("*.py"):
        shutil.copy(path, directory / path.name)
    tokenizer = train_tokenizer(DEFAULT_CORPUS, SPECIAL_TOKENS[kind])
    if kind == "cogvlm":
        tokenizer.bos_token = SPECIAL_TOKENS[kind][0]
    else:
        tokenizer.chat_template = chat_template("")
    tokenizer.save_pretrained(directory)
    text = layer_sizes(tokenizer, HIDDEN) | {"bos_token_id": None}
    config = CONFIGS[kind](text)
    if kind == "cogvlm":
        config["vision_config"]["pad_token_id"] = tokenizer.convert_tokens_to_ids(SPECIAL_TOKENS[kind][1])
    (directory / "config.json").write_text(json.dumps(config))
    for name, content in FILES.get(kind, {}).items():
        (directory / name).write_text(json.dumps(content))
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = created(directory)
        model.post_init()
    model.save_pretrained(directory)
    (directory / "config.json").write_text(json.dumps(config))  # as it was published
    (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": tokenizer.eos_token_id}))
    sys.modules.pop("transformers_modules", None)
    return directory


def created(directory: Path) -> Any:
    """Create the model of a checkpoint as its own code does, without an adapter, with random weights."""
    config: Any = AutoConfig.from_pretrained(directory, trust_remote_code=True)
    return getattr(transformers, auto_name(config)).from_config(config, trust_remote_code=True)


def internvl_config(text: dict[str, Any]) -> dict[str, Any]:
    return {
        "model_type": "internvl_chat", "architectures": ["InternVLChatModel"],
        "auto_map": {
            "AutoConfig": "configuration_internvl_chat.InternVLChatConfig",
            "AutoModel": "modeling_internvl_chat.InternVLChatModel",
            "AutoModelForCausalLM": "modeling_internvl_chat.InternVLChatModel",
        },
        "llm_config": text | {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"},
        "vision_config": {"hidden_size": 32, "image_size": 16, "patch_size": 4, "num_hidden_layers": 1},
        "downsample_ratio": 0.5, "force_image_size": 16, "min_dynamic_patch": 1, "max_dynamic_patch": 4,
        "use_thumbnail": True, "template": "internvl2_5", "ps_version": "v2", "select_layer": -1,
    }  # fmt: skip


def minicpmv_config(text: dict[str, Any]) -> dict[str, Any]:
    return text | {
        "model_type": "minicpmv", "architectures": ["MiniCPMV"], "version": 2.6, "query_num": 4, "patch_size": 4,
        "auto_map": {"AutoConfig": "configuration_minicpm.MiniCPMVConfig", "AutoModel": "modeling_minicpmv.MiniCPMV"},
        "vision_config": {"hidden_size": 32, "patch_size": 4},
    }  # fmt: skip


def cogvlm_config(text: dict[str, Any]) -> dict[str, Any]:
    sizes = {name: text[name] for name in ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads")}
    return sizes | {
        "architectures": ["CogVLMForCausalLM"], "num_multi_query_heads": 2, "intermediate_size": 128,
        "eos_token_id": text["eos_token_id"], "template_version": "chat",
        "auto_map": {
            "AutoConfig": "configuration_cogvlm.CogVLMConfig",
            "AutoModelForCausalLM": "modeling_cogvlm.CogVLMForCausalLM",
        },
        "vision_config": {"hidden_size": 32, "image_size": 16, "patch_size": 4},
    }  # fmt: skip


CONFIGS = {"internvl_chat": internvl_config, "minicpmv": minicpmv_config, "cogvlm": cogvlm_config}
FILES = {
    "minicpmv": {
        "preprocessor_config.json": {
            "image_processor_type": "MiniCPMVImageProcessor", "processor_class": "MiniCPMVProcessor",
            "auto_map": {
                "AutoImageProcessor": "image_processing_minicpmv.MiniCPMVImageProcessor",
                "AutoProcessor": "processing_minicpmv.MiniCPMVProcessor",
            },
            "scale_resolution": 16, "patch_size": 4, "image_feature_size": 4,
        },
    }
}  # fmt: skip
