"""Stand-in for CogVLM2's vision tower: patches with a first token that is dropped, and vectors before and after."""

import torch
from torch import nn


class GLU(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.linear_proj = nn.Linear(width, width, bias=False)
        self.norm1 = nn.LayerNorm(width)
        self.gate_proj = nn.Linear(width, 2 * width, bias=False)
        self.dense_4h_to_h = nn.Linear(2 * width, width, bias=False)

    def forward(self, x):
        x = nn.functional.gelu(self.norm1(self.linear_proj(x)))
        return self.dense_4h_to_h(nn.functional.silu(self.gate_proj(x)))


class EVA2CLIPModel(nn.Module):
    def __init__(self, config):
        super().__init__()
        sizes = config.vision_config
        width, side = sizes["hidden_size"], sizes["image_size"] // sizes["patch_size"]
        self.side = side
        self.patch_embedding = nn.Conv2d(3, width, sizes["patch_size"], sizes["patch_size"])
        self.position_embedding = nn.Embedding(side**2 + 1, width)
        self.cls_embedding = nn.Parameter(torch.randn(1, width))
        self.transformer = nn.TransformerEncoderLayer(width, 2, 2 * width, dropout=0.0, batch_first=True)
        self.conv = nn.Conv2d(width, config.hidden_size, kernel_size=2, stride=2)
        self.linear_proj = GLU(config.hidden_size)
        self.boi = nn.Parameter(torch.randn(1, 1, config.hidden_size))
        self.eoi = nn.Parameter(torch.randn(1, 1, config.hidden_size))

    def forward(self, images):
        patches = self.patch_embedding(images).flatten(2).transpose(1, 2)
        first = self.cls_embedding.expand(len(images), 1, -1)
        x = torch.cat([first, patches], dim=1) + self.position_embedding.weight
        x = self.transformer(x)[:, 1:].transpose(1, 2).unflatten(2, (self.side, self.side))
        x = self.linear_proj(self.conv(x).flatten(2).transpose(1, 2))
        ends = (vector.expand(len(images), 1, -1).to(x.dtype) for vector in (self.boi, self.eoi))
        first, last = ends
        return torch.cat([first, x, last], dim=1)
