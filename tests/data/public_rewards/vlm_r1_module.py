"""In the form of VLM-R1's modules of models: static methods, and boxes in the image that the model sees."""

# As published, without checks for None.
# pyright: reportOptionalSubscript=false, reportOptionalMemberAccess=false, reportArgumentType=false
# pyright: reportCallIssue=false

import json
import re

from PIL import Image


class Qwen2VLModule:
    @staticmethod
    def iou_reward(completions, solution, **kwargs):
        """Overlap of the first box, scaled to the image's own pixels, with the box in the last answer tag."""

        def iou(box1, box2):
            left, top = max(box1[0], box2[0]), max(box1[1], box2[1])
            right, bottom = min(box1[2], box2[2]), min(box1[3], box2[3])
            inter = max(0, right - left) * max(0, bottom - top)
            areas = [(box[2] - box[0]) * (box[3] - box[1]) for box in (box1, box2)]
            return float(inter) / (sum(areas) - inter)

        def resize_bbox(bbox, input_height, input_width, image_height, image_width):
            scales = (image_width / input_width, image_height / input_height) * 2
            return [side * scale for side, scale in zip(bbox, scales, strict=True)]

        contents = [completion[0]["content"] for completion in completions]
        rewards = []
        for i, (content, sol) in enumerate(zip(contents, solution, strict=True)):
            image_grid_thw = kwargs.get("image_grid_thw")[i]
            image_path = kwargs.get("image_path")[i][0]
            image_width, image_height = Image.open(image_path).size
            input_height = int(image_grid_thw[1] * 14)
            input_width = int(image_grid_thw[2] * 14)

            sol = json.loads(re.findall(r"<answer>(.*?)</answer>", sol, re.DOTALL)[-1].strip())
            reward = 0.0
            try:
                answer = re.search(r"<answer>(.*?)</answer>", content, re.DOTALL).group(1)
                found = re.search(r"\[\s*(\d+),\s*(\d+),\s*(\d+),\s*(\d+)\s*\]", answer)
                bbox = [int(side) for side in found.groups()]
                reward = iou(resize_bbox(bbox, input_height, input_width, image_height, image_width), sol)
            except Exception:
                pass
            rewards.append(reward)
        return rewards
