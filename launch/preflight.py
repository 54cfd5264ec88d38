"""`rl-vlm doctor --ranks` as a module: `accelerate launch … -m launch.preflight CONFIG [KEY=VALUE …]`."""

import sys

from launch import cli


def main() -> int:
    return cli.run("doctor", [*sys.argv[1:], "--ranks"])


if __name__ == "__main__":
    cli.end_process_after(main)
