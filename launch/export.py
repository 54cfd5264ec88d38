"""`rl-vlm export`: write the model of a run as a directory that transformers, peft and vLLM load."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from launch.help import path


def export_parser() -> argparse.ArgumentParser:
    """Build the parser of `rl-vlm export`."""
    parser = argparse.ArgumentParser(
        prog="rl-vlm export",
        description="Write the model of a run as a directory that transformers, peft and vLLM load.",
    )
    parser.add_argument(
        "source", type=path, metavar="RUN_OR_CHECKPOINT",
        help="train.output_dir of a run, whose best or newest checkpoint is exported, or a checkpoint",
    )  # fmt: skip
    parser.add_argument(
        "--merge",
        action="store_true",
        help="merge the adapter of a LoRA run into its base model, and write all weights",
    )
    parser.add_argument(
        "--to", type=path, metavar="DIR",
        help="directory to write; default: `export` in the parent directory of the checkpoint",
    )  # fmt: skip
    parser.add_argument(
        "--dtype", choices=["float32", "bfloat16"],
        help="precision of a model's weights; default: the run's model.dtype",
    )  # fmt: skip
    return parser


def export_command(arguments: Sequence[str]) -> int:
    """Run `rl-vlm export`, and return the exit status. Raises RLVLMError if the model cannot be exported."""
    options = export_parser().parse_args(arguments)
    from rl_vlm.log.terminal import hide_bars_of_libraries
    from rl_vlm.tools.export.write import export

    hide_bars_of_libraries()
    exported, directory = export(options.source, options.merge, options.to, options.dtype)
    what = {"model": "model", "adapter": "adapter", "merged": "base model with the merged adapter"}[exported.form]
    print(f"The {what} of {exported.source.checkpoint} is in {directory}, with a model card in README.md.")
    if exported.form == "adapter":
        print(f"It is for the base model {exported.source.base}; --merge writes a model that needs no other.")
    if exported.form == "merged" and exported.source.model.load_in_4bit:
        print("It was trained on a base in 4 bits, and is merged into the unquantized one: log-probs differ a little.")
    return 0
