"""The README's programs run."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

import gradwire
from torchrun import run_program

ROOT = Path(__file__).resolve().parents[2]
EXAMPLE = ROOT / "examples" / "transformer.py"
README = (ROOT / "README.md").read_text(encoding="utf-8")
TRAINING, ARRAYS = re.findall(r"^```python\n(.*?)^```$", README, re.DOTALL | re.MULTILINE)
YOURS = """import torch

def Transformer():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.GELU(), torch.nn.Linear(256, 8))

batches = [(torch.randn(32, 64), torch.randint(8, (32,))) for _ in range(8)]
"""


def test_the_training_runs(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(YOURS + TRAINING, encoding="utf-8")
    printed, errors = run_program(program, 2)
    assert "x less than raw" in printed, errors


ON_A_DEVICE = f"""import sys

sys.path.insert(0, {str(Path(__file__).parent)!r})
import array_device

array_device.install()
torch.__future__.set_swap_module_params_on_conversion(True)  # as this device needs
device = DEVICE
batches = [(x.bfloat16().to(device), y.to(device)) for x, y in batches]
"""
SEED = "import os, torch\ntorch.manual_seed(int(os.environ['RANK']))\n"
DIGEST = """
import hashlib
parts = [p.detach().cpu().float().numpy().tobytes() for p in model.parameters()]
sys.stdout.write(f"[{hashlib.sha256(b''.join(parts)).hexdigest()} {model[0].weight.device}]\\n")
"""
ADAMW = "adamw = torch.optim.AdamW(model.parameters(), lr=3e-3)"
MUON = """adamw = [
    torch.optim.Muon([p for p in model.parameters() if p.ndim == 2]),
    torch.optim.AdamW([p for p in model.parameters() if p.ndim < 2], lr=3e-3),
]"""


@pytest.mark.parametrize("optimizers", [ADAMW, MUON], ids=["AdamW", "Muon and AdamW"])
def test_the_training_runs_on_any_device_in_bfloat16(tmp_path: Path, optimizers: str) -> None:
    """With the same bits on all ranks and devices."""
    assert ADAMW in TRAINING
    training = TRAINING.replace(ADAMW, optimizers)
    training = training.replace("= Transformer()", "= Transformer().bfloat16().to(device)")
    found = set()
    for device in ("cpu", "arraydevice:0"):
        program = tmp_path / "program.py"
        of_device = ON_A_DEVICE.replace("DEVICE", repr(device), 1)
        program.write_text(SEED + YOURS + of_device + training + DIGEST, encoding="utf-8")
        printed, errors = run_program(program, 2)
        assert "x less than raw" in printed, errors
        digests = re.findall(rf"\[(\w{{64}}) {device}\]", printed)
        assert len(digests) == 2, printed
        found |= set(digests)
    assert len(found) == 1


def test_the_example_is_the_same_program() -> None:
    """The example has each line of the README's training, whose optimizer takes its options."""
    example = EXAMPLE.read_text(encoding="utf-8")
    own = [line.partition("  #")[0].strip() for line in TRAINING.splitlines()]
    assert [line for line in own if line not in example] == [
        "# torchrun --nproc-per-node 4 program.py",
        'optimizer = compress(model, adamw, codec="small", clip_norm=1.0)',
        "for inputs, targets in batches:",
        "loss = torch.nn.functional.cross_entropy(model(inputs), targets)",
    ]


@pytest.mark.parametrize("options", [["--codec", "ddp"], ["--every", "4"]], ids=["ddp", "every-4"])
def test_the_example_runs(tmp_path: Path, options: list[str]) -> None:
    arguments = [str(EXAMPLE), "--steps", "6", *options]
    program = tmp_path / "program.py"
    program.write_text(
        f"import runpy, sys\nsys.argv = {arguments}\n"
        f"runpy.run_path({str(EXAMPLE)!r}, run_name='__main__')\n"
    )
    printed, _ = run_program(program, 2)
    assert re.search(r"loss on held-out text [34]\.\d+", printed), printed
    assert ("x less than raw" in printed) == ("ddp" not in options)


def test_arrays_come_back() -> None:
    x = np.linspace(-1, 1, 1000, dtype=np.float32)
    names = {"x": x}
    exec(compile(ARRAYS, "README.md", "exec"), names)
    assert names["y"].shape == x.shape
    assert gradwire.inspect(names["frame"])["codec"].startswith("3lc")
