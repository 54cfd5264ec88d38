"""Stand-in for CogVLM2's configuration, which has no `model_type`, and its vision config as a dictionary."""

from transformers import PretrainedConfig


class CogVLMConfig(PretrainedConfig):
    _auto_class = "AutoConfig"

    def __init__(
        self,
        vocab_size=400,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_multi_query_heads=2,
        max_position_embeddings=4096,
        initializer_range=0.02,
        rms_norm_eps=1e-5,
        template_version="chat",
        **kwargs,
    ):
        self.vocab_size = vocab_size
        self.hidden_size = hidden_size
        self.intermediate_size = intermediate_size
        self.num_hidden_layers = num_hidden_layers
        self.num_attention_heads = num_attention_heads
        self.num_multi_query_heads = num_multi_query_heads
        self.max_position_embeddings = max_position_embeddings
        self.initializer_range = initializer_range
        self.rms_norm_eps = rms_norm_eps
        self.template_version = template_version
        super().__init__(**kwargs)
