"""Every seed of the fuzzer of file readers, and every input that once found a fault."""

import subprocess
import sys
from pathlib import Path

import tensor_files

REPOSITORY = Path(__file__).parents[2]


def test_readers_of_files_take_every_input(tmp_path: Path) -> None:
    subprocess.run([sys.executable, REPOSITORY / "fuzz/make_corpus.py", tmp_path], check=True)
    seeds = sorted((tmp_path / "tensor_files").iterdir())
    crashes = sorted((REPOSITORY / "fuzz/crashes/tensor_files").iterdir())
    assert len(seeds) > 50
    assert crashes
    for path in seeds + crashes:
        try:
            tensor_files.check(path.read_bytes())
        except Exception as error:
            raise AssertionError(f"{path.name}: {error!r}") from error
