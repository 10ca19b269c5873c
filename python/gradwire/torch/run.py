"""Runs a training script, unchanged, over the backend "gradwire".

torchrun --nproc-per-node 4 -m gradwire.torch.run [options] train.py [its arguments]
"""

from __future__ import annotations

import argparse
import runpy
import sys
from pathlib import Path

from gradwire import GradwireError
from gradwire.torch.backend.process_group import CODEC
from gradwire.torch.backend.whole_program import replace_backend, watch_program


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m gradwire.torch.run",
        description="Runs a training script over the backend gradwire, which compresses large "
        "all-reduces and reduce-scatters: torchrun ... -m gradwire.torch.run train.py",
    )
    parser.add_argument("--codec", default=CODEC, help=f"of sums and averages (default: {CODEC})")
    parser.add_argument("--all-gather", metavar="CODEC", help="compress all-gathers, too")
    parser.add_argument(
        "--min-numel", type=int, default=65536, help="compress so many values or more (65536)"
    )
    parser.add_argument("script", help="the program, as python would run it")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="of the program")
    options = parser.parse_args()
    if not Path(options.script).is_file():
        parser.error(f"there is no script {options.script}")
    try:
        replace_backend(options.codec, options.all_gather, options.min_numel)
    except (GradwireError, ValueError) as error:
        parser.error(str(error))
    watch_program()
    sys.argv = [options.script, *options.arguments]
    sys.path[0] = str(Path(options.script).resolve().parent)
    runpy.run_path(options.script, run_name="__main__")


if __name__ == "__main__":
    main()
