"""Kinds of problems that make a row unusable, with their remedies."""

from rl_vlm.errors import RowProblem

MISSING_IMAGE = RowProblem(
    "missing image", "Put the file there, or set data.image_root to the folder of relative paths."
)
LARGE_IMAGE = RowProblem("image above the pixel cap", "Shrink the file, or raise data.max_image_pixels.")
UNREADABLE_IMAGE = RowProblem("unreadable image", "Write the file again, or leave the row out.")
MISSING_VIDEO = RowProblem(
    "missing video", "Put the file there, or set data.video_root to the folder of relative paths."
)
LARGE_VIDEO = RowProblem(
    "video above a limit", "Cut or shrink the file, or raise data.max_video_seconds or data.max_image_pixels."
)
UNREADABLE_VIDEO = RowProblem("unreadable video", "Write the file again, or leave the row out.")
PROBLEMS = {
    "image": (MISSING_IMAGE, LARGE_IMAGE, UNREADABLE_IMAGE),
    "video": (MISSING_VIDEO, LARGE_VIDEO, UNREADABLE_VIDEO),
}
"""Of each kind of medium: the file is missing, above a limit, or cannot be read."""
UNEQUAL_MARKS = RowProblem(
    "marks and images that differ in number",
    "Write one mark <image> or <video> for each image or video, or none to have all put first.",
)
EMPTY_PROMPT = RowProblem("empty prompt", "Write a prompt, or <image> alone for an image without a question.")
ANSWERED_PROMPT = RowProblem("prompt that ends with its answer", "Split it off with data.columns, or leave it out.")
UNFILLED_TEMPLATE = RowProblem("template that cannot be filled", "Fill the columns of data.prompt_template.")
