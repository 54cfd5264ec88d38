"""`rl-vlm eval` as a module: `accelerate launch -m launch.evaluate CONFIG [KEY=VALUE …]`."""

import sys

from launch import cli


def main() -> int:
    return cli.run("eval", sys.argv[1:])


if __name__ == "__main__":
    cli.end_process_after(main)
