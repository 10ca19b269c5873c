"""torchft: the sums between two replicas are compressed. One of them dies, and comes back.

python examples/recipes/torchft_ddp.py
"""

import hashlib
import os
import signal
import threading

import torch
import torch.multiprocessing as mp
from torch import nn
from torchft import Manager, Optimizer
from torchft.coordination import LighthouseServer

from gradwire.contrib.torchft import DistributedDataParallel, ProcessGroupGradwire

STEPS = 300
DIES, ALONE = 100, 50  # replica 1 dies after so many steps; then replica 0 takes so many alone


def train(replica: int, life: int, lighthouse: str, both: threading.Barrier) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="0")
    store = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 8))
    sgd = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)

    def load(saved):
        model.load_state_dict(saved["model"])
        sgd.load_state_dict(saved["sgd"])

    group = ProcessGroupGradwire("3lc:s=1.00,coder=rice", min_numel=4096)  # the new line
    manager = Manager(
        pg=group,
        load_state_dict=load,
        state_dict=lambda: {"model": model.state_dict(), "sgd": sgd.state_dict()},
        min_replica_size=1,
        rank=0,
        world_size=1,
        store_addr="127.0.0.1",
        store_port=store.port,
        lighthouse_addr=lighthouse,
        replica_id=f"replica_{replica}",
        hostname="127.0.0.1",
        use_async_quorum=False,
    )
    model_ddp = DistributedDataParallel(manager, model)  # gradwire's, see below
    optimizer = Optimizer(manager, sgd)
    target = torch.randn(64, 8)
    torch.manual_seed(1 + replica + 2 * life)
    both.wait()  # so that this program does the same each time; a training needs no such line
    while manager.current_step() < STEPS:
        step = manager.current_step()
        if step == DIES and replica == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        if step == DIES + ALONE and both is not None and replica == 0:
            both.wait()  # now replica 1 is started again
            both.wait()  # and here it is
            both = None
        inputs = torch.randn(32, 64)
        optimizer.zero_grad()  # finds out which replicas take part
        loss = nn.functional.cross_entropy(model_ddp(inputs), (inputs @ target).argmax(dim=1))
        loss.backward()
        optimizer.step()  # if no replica failed meanwhile
        if replica == 0 and manager.current_step() % 50 == 0:
            taking_part = f"{manager.num_participants()} of 2 replicas"
            print(
                f"step {manager.current_step()}, {taking_part}: loss {loss.item():.3f}", flush=True
            )
    digest = hashlib.sha256(b"".join(p.detach().numpy().tobytes() for p in model.parameters()))
    print(f"replica {replica} ends with model {digest.hexdigest()[:12]}", flush=True)
    if replica == 0:
        print(f"sums of two replicas: {group.ratio():.2f} x less than raw", flush=True)
    manager.shutdown(wait=False)


if __name__ == "__main__":
    # join_timeout_ms: for how long replicas wait for those of the step before.
    lighthouse = LighthouseServer(bind="127.0.0.1:0", min_replicas=1, join_timeout_ms=1000)
    context = mp.get_context("spawn")
    both = context.Barrier(2, timeout=120)

    def start(replica: int, life: int) -> mp.Process:
        process = context.Process(target=train, args=(replica, life, lighthouse.address(), both))
        process.start()
        return process

    first, second = start(0, 0), start(1, 0)
    second.join()
    both.wait()
    print("replica 1 died, and is started again", flush=True)
    again = start(1, 1)
    first.join()
    again.join()
    lighthouse.shutdown()
    raise SystemExit(first.exitcode or again.exitcode)
