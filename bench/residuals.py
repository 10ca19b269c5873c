"""How large residuals grow, and what residual=bf16 loses, over many steps.

The input is 4096 values x with a heavy tail: the same in every step, or a fifth of x plus fresh
normal noise of the size of x. After so many steps this prints

  owed   norm of the residual / norm of the input (for noise: of x)
  lost   norm of (sum of inputs - sum of decoded values - residual) / norm of the sum of inputs

Without rounding nothing would be lost.

Run:  .venv/bin/python bench/residuals.py [CODEC...]
"""

from __future__ import annotations

import sys

import numpy as np

import gradwire

CODECS = ("onebit", "onebit:bucket=512", "stc", "stc:density=0.9", "3lc:s=1", "topk", "int8")
VALUES = 4096
MARKS = (1000, 5000, 10_000)
FRESH = 997  # inputs of noise, which are used in turn


def measure(codec: str, inputs: np.ndarray) -> list[tuple[float, float]]:
    """`owed` and `lost` at each mark. inputs: (k, VALUES), one for each step, used in turn."""
    compressor = gradwire.Compressor(codec, VALUES)
    due = np.zeros(VALUES)
    decoded = np.zeros(VALUES)
    found = []
    for step in range(MARKS[-1]):
        x = inputs[step % len(inputs)]
        due += x
        decoded += gradwire.decode(compressor.encode(x, step))
        if step + 1 in MARKS:
            residual = compressor.residual
            assert residual is not None
            owed = np.linalg.norm(residual) / np.linalg.norm(VECTOR)
            lost = np.linalg.norm(due - decoded - residual) / np.linalg.norm(due)
            found.append((float(owed), float(lost)))
    return found


random = np.random.default_rng(1)
VECTOR = random.standard_normal(VALUES) * np.exp(random.standard_normal(VALUES))
NOISE = random.standard_normal((FRESH, VALUES)) * abs(VECTOR) + 0.2 * VECTOR
INPUTS = {"constant": VECTOR[None].astype(np.float32), "noise": NOISE.astype(np.float32)}

print(f"owed, lost after {', '.join(f'{mark:,}' for mark in MARKS)} steps")
for name in sys.argv[1:] or CODECS:
    for kind, inputs in INPUTS.items():
        for residual in ("f32", "bf16"):
            text = f"{name}{',' if ':' in name else ':'}residual={residual}"
            rows = "   ".join(f"{owed:6.1f} {lost:8.1e}" for owed, lost in measure(text, inputs))
            print(f"{text:32} {kind:8}   {rows}", flush=True)
