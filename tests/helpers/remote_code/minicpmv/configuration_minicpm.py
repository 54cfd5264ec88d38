"""Stand-in for MiniCPM-V 2.6's configuration, which extends that of its language model."""

from transformers import PretrainedConfig, Qwen2Config


class MiniCPMVConfig(Qwen2Config):
    model_type = "minicpmv"

    def __init__(self, query_num=4, patch_size=4, vision_config=None, version=2.6, **kwargs):
        self.query_num = query_num
        self.patch_size = patch_size
        self.version = version
        self.vision_config = PretrainedConfig(**(vision_config or {}))
        super().__init__(**kwargs)
