"""Kinds of problems that make a row unusable, with their remedies."""

from rl_vlm.errors import RowProblem

MISSING_IMAGE = RowProblem(
    "missing image", "Put the file there, or set data.image_root to the folder of relative paths."
)
LARGE_IMAGE = RowProblem("image above the pixel cap", "Shrink the file, or raise data.max_image_pixels.")
UNREADABLE_IMAGE = RowProblem("unreadable image", "Write the file again, or leave the row out.")
UNEQUAL_MARKS = RowProblem(
    "marks and images that differ in number", "Write one <image> mark per image, or none to have all images put first."
)
EMPTY_PROMPT = RowProblem("empty prompt", "Write a prompt, or <image> alone for an image without a question.")
ANSWERED_PROMPT = RowProblem("prompt that ends with its answer", "Split it off with data.columns, or leave it out.")
UNFILLED_TEMPLATE = RowProblem("template that cannot be filled", "Fill the columns of data.prompt_template.")
