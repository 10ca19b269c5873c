"""The sentences of the page that no number changes."""

from __future__ import annotations

from rivals.ways import COMMON, EVERY, STEPS, TARGETS, WORKERS

HEAD = f"""# gradwire and what people would take instead

Each way trains the same transformer of 664,448 parameters with the same batches: {WORKERS} workers,
{STEPS} steps of AdamW, the sources of Python's library as text. Every rival is run from its own
package, with the options of its documentation. Ways of gradwire are
bold. Times, and the MB that a worker sends, are those until the loss on held-out text is at most
{TARGETS[0]:g} or {TARGETS[1]:g} nats a byte, [computed](#how-it-was-made) from measured steps. A
packet travels for 20 ms.
"""

SETTINGS = f"""## Settings

- **All**: batches of {COMMON["batch"]} sequences a worker, {COMMON["warmup"]} steps of warm-up,
  then a cosine; weight decay {COMMON["weight_decay"]:g}, gradients clipped at norm
  {COMMON["clip"]:g}.
- **DDP**: PyTorch's, alone or with `bf16_compress_hook`. **PowerSGD**: `powerSGD_hook` with error
  feedback and warm start, after a tenth of the steps, one bucket.
- **Local steps** of all rivals are {EVERY}, where a row names no others.
- **torchft**: `DiLoCo`, a manager for each worker, synchronous quorum, Nesterov
  with rate 0.7 and momentum 0.9 outside; `use_bucketization` is off, the default, or on
  (*buckets*); `should_quantize` is off, because it needs Triton.
- **hivemind**: `DecentralizedAverager` of the parameters, with
  `Uniform8BitQuantization`; it waits for its peers at most 3 s, as it recommends for few. Behind
  links some starts waited in an exchange for ever, and were made again; with every=4 at 10 Mbit/s
  three did, and no step was timed.
- **Flower**: `FedAvg` over gRPC; the server is beside worker 0, on its link.
- **gradwire**: *hook* is `gradwire_hook` in DDP; *compress* is what `compress(model, adamw)`
  takes, the changes of every step, or of two or four; *DiLoCo* is `LocalSteps` every {EVERY} steps
  with `outer_nesterov`; *streaming* is the same in three fragments that take turns, whose exchanges
  take five steps, and half of a worker's own values stay (`mix`); *SparseLoCo* is `sparse_loco()`
  with 2 % of the values every 10 steps.
"""

RATES = f"""## Learning rates

The loss after {STEPS} steps with seed 0. Each way began with 0.003, or, with Nesterov's
momentum outside, with 0.001. Then half and twice the best rate were tried, as long as the loss
fell. All tables have the best one. Rates are in thousandths.
"""

ABOUT = f"""## How it was made

Steps to a loss do not depend on the links, and the time of a step not on the seed. So each way
trained over the loopback, in processes of its own, and its losses were looked at every {EVERY}
steps; between two of them a straight line gives the step. Behind each link a few steps were timed
while nothing else ran on the machine, and the bytes counted by the workers' interfaces, headers
included: six steps after three, in whole intervals.
Time is steps times step time; PowerSGD's first steps count as DDP's. Whole runs behind links check
the times; where there is one, its bytes a step count. *All MB* is {STEPS} times the bytes of a
step. `scripts/rivals.sh` makes the environments, runs what [`rivals.jsonl`](rivals.jsonl) lacks,
and draws this page."""

REFEREE = """## What a referee would still say

- **The model is a toy.** 0.7 million parameters and 600 steps say nothing about a billion and a
  million, where DiLoCo has its ground, and where a gradient's bytes weigh more than its hops.
- **Workers share two cores**, also with the program that carries their packets. Slow computation
  hides what the network costs, most of all with 1000 Mbit/s.
- **Only the learning rate was tuned**, by the loss that is shown, on a seed that is shown, too: no
  momentum, decay or warm-up, and no outer rate. SparseLoCo's interval was chosen from 10 and 30
  steps in trials that were not kept.
- **The authors tuned gradwire longer than the rivals.** Their options are those of their
  documentation; somebody who knows them well may find better ones. Their local steps were chosen
  by trials of few numbers.
- **The lower loss at the end is not the codec's.** *compress* steps Adam on each worker's own
  gradient, which in the mean ends lower than DDP here without compression, too (*compress, raw*).
- **Times are computed**, but for the whole runs above. A lead that is smaller than what these
  differ by says nothing.
- **Few seeds**, few steps behind each link, and each link was timed once.
"""
