"""A small transformer learns Python's own source code with AdamW, on the ranks of torchrun.

torchrun --nproc-per-node 4 examples/transformer.py [--codec CODEC] [--every 1] [--steps 300]

--codec ddp trains the same model in DistributedDataParallel without gradwire, for comparison.
"""

import argparse
import sysconfig
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

from gradwire.torch import compress

BATCH, CONTEXT, WIDTH = 8, 64, 128


class Transformer(nn.Module):
    """Predicts the next byte of a text."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = nn.Embedding(256, WIDTH)
        self.places = nn.Embedding(CONTEXT, WIDTH)
        layer = nn.TransformerEncoderLayer(
            WIDTH, 4, 4 * WIDTH, 0.0, "gelu", batch_first=True, norm_first=True, bias=False
        )
        self.layers = nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, 256, bias=False)

    def forward(self, text: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(CONTEXT)
        x = self.layers(self.bytes(text) + self.places.weight, mask, is_causal=True)
        return self.head(x).flatten(0, 1)


def read_text() -> tuple[Tensor, Tensor]:
    """The modules of Python's library as bytes: those to train on, and a twentieth held out."""
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    held_out = files[::20]
    parts = [file for file in files if file not in held_out], held_out
    train, test = (bytearray().join(file.read_bytes() for file in part) for part in parts)
    return torch.frombuffer(train, dtype=torch.uint8), torch.frombuffer(test, dtype=torch.uint8)


def windows(text: Tensor, starts: Tensor) -> tuple[Tensor, Tensor]:
    """CONTEXT bytes from each start, and the byte after each of them."""
    chosen = text[starts[:, None] + torch.arange(CONTEXT + 1)].long()
    return chosen[:, :-1], chosen[:, 1:].flatten()


parser = argparse.ArgumentParser()
parser.add_argument("--codec", default="small")
parser.add_argument("--every", type=int, default=1)
parser.add_argument("--steps", type=int, default=300)
options = parser.parse_args()

dist.init_process_group("gloo")
torch.manual_seed(0)
model = Transformer()
adamw = torch.optim.AdamW(model.parameters(), lr=3e-3)
if options.codec == "ddp":
    optimizer, trained = adamw, DistributedDataParallel(model)
else:
    optimizer = compress(model, adamw, options.codec, every=options.every, clip_norm=1.0)
    trained = model
schedule = torch.optim.lr_scheduler.OneCycleLR(
    optimizer, 3e-3, options.steps, pct_start=0.15, cycle_momentum=False
)

train, test = read_text()
torch.manual_seed(1 + dist.get_rank())  # from here on every rank has its own data
begin = time.perf_counter()
for step in range(options.steps):
    inputs, targets = windows(train, torch.randint(len(train) - CONTEXT, (BATCH,)))
    loss = cross_entropy(trained(inputs), targets)
    optimizer.zero_grad()
    loss.backward()
    if options.codec == "ddp":
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    schedule.step()
    if dist.get_rank() == 0 and step % 50 == 49:
        print(f"step {step + 1}: loss {loss.item():.3f}", flush=True)
if options.codec != "ddp":
    optimizer.synchronize()  # exchanges what is left, so that all ranks have the same model
seconds = time.perf_counter() - begin

starts = torch.linspace(0, len(test) - CONTEXT - 1, 768).long()
with torch.no_grad():
    batches = [windows(test, some) for some in starts.split(64)]
    losses = [cross_entropy(model(inputs), targets).item() for inputs, targets in batches]
held_out = sum(losses) / len(losses)
if dist.get_rank() == 0:
    if options.codec != "ddp":
        print(optimizer.stats())
    print(f"loss on held-out text {held_out:.3f}, {seconds:.1f} s")
if options.codec != "ddp":
    optimizer.close()
dist.destroy_process_group()
