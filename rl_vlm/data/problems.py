"""Kinds of problems that make a row unusable, with their remedies."""

from rl_vlm.errors import Problem

UNUSABLE = Problem("row that cannot be used", "Change the row as the message says, or leave it out.")
"""Problem of a row whose error names no kind."""
MISSING_IMAGE = Problem("missing image", "Put the file there, or set data.image_root to the folder of relative paths.")
LARGE_IMAGE = Problem("image above the pixel cap", "Shrink the file, or raise data.max_image_pixels.")
UNREADABLE_IMAGE = Problem("unreadable image", "Write the file again, or leave the row out.")
MISSING_VIDEO = Problem("missing video", "Put the file there, or set data.video_root to the folder of relative paths.")
LARGE_VIDEO = Problem(
    "video above a limit", "Cut or shrink the file, or raise data.max_video_seconds or data.max_image_pixels."
)
UNREADABLE_VIDEO = Problem("unreadable video", "Write the file again, or leave the row out.")
PROBLEMS = {
    "image": (MISSING_IMAGE, LARGE_IMAGE, UNREADABLE_IMAGE),
    "video": (MISSING_VIDEO, LARGE_VIDEO, UNREADABLE_VIDEO),
}
"""Of each kind of medium: the file is missing, above a limit, or cannot be read."""
UNEQUAL_MARKS = Problem(
    "marks and images that differ in number",
    "Write one mark <image> or <video> for each image or video, or none to have all put first.",
)
EMPTY_PROMPT = Problem("empty prompt", "Write a prompt, or <image> alone for an image without a question.")
ANSWERED_PROMPT = Problem("prompt that ends with its answer", "Split it off with data.columns, or leave it out.")
UNFILLED_TEMPLATE = Problem("template that cannot be filled", "Fill the columns of data.prompt_template.")
LONG_PROMPT = Problem(
    "prompt with too many tokens", "Shorten the prompt or raise data.max_prompt_length: the run leaves the row out."
)
BEYOND_CONTEXT = Problem(
    "prompt beyond the model's context", "Shorten the prompt, or leave such rows out with data.max_prompt_length."
)
