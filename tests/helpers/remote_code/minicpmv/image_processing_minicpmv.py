"""Stand-in for MiniCPM-V 2.6's image processor: one slice of the image's ratio, and two more of wide images."""

import numpy as np
import torch
from transformers import BatchFeature
from transformers.image_processing_utils import BaseImageProcessor


class MiniCPMVImageProcessor(BaseImageProcessor):
    model_input_names = ["pixel_values"]  # noqa: RUF012

    def __init__(self, scale_resolution=16, patch_size=4, image_feature_size=4, **kwargs):
        super().__init__(**kwargs)
        self.scale_resolution = scale_resolution
        self.patch_size = patch_size
        self.image_feature_size = image_feature_size

    def num_slices(self, size):
        width, height = size
        return 3 if width > 2 * height else 1

    def get_slice_image_placeholder(self, image_size, image_idx=0, max_slice_nums=None, use_image_id=None):
        feature = "<unk>" * self.image_feature_size
        more = self.num_slices(image_size) - 1
        return f"<image>{feature}</image>" + f"<slice>{feature}</slice>" * more

    def slices(self, image):
        whole = image.resize((self.scale_resolution, self.scale_resolution))
        half = image.width // 2
        halves = [image.crop((x, 0, x + half, image.height)).resize((8, 16)) for x in (0, half)]
        return [whole, *(halves if self.num_slices(image.size) > 1 else [])]

    def preprocess(self, images, do_pad=True, max_slice_nums=None, return_tensors=None, **kwargs):
        pixels, sizes, grids = [], [], []
        for row in images:
            slices = [part for image in row for part in self.slices(image)]
            pixels.append([self.by_patch(part) for part in slices])
            sizes.append([image.size for image in row])
            grids.append(torch.tensor([[p.height // self.patch_size, p.width // self.patch_size] for p in slices]))
        return BatchFeature({"pixel_values": pixels, "image_sizes": sizes, "tgt_sizes": grids})

    def by_patch(self, image):
        """(3, patch, number of patches times patch)"""
        side = self.patch_size
        values = torch.from_numpy(np.asarray(image, dtype=np.float32) / 127.5 - 1).permute(2, 0, 1)
        patches = values.unfold(1, side, side).unfold(2, side, side)
        return patches.reshape(3, -1, side, side).permute(0, 2, 1, 3).reshape(3, side, -1)
