"""`rl-vlm train` as a module: `accelerate launch -m launch.train CONFIG [KEY=VALUE …]`."""

import sys

from launch import cli


def main() -> int:
    return cli.run("train", sys.argv[1:])


if __name__ == "__main__":
    cli.end_process_after(main)
