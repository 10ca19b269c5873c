"""torchft: the sums between the replicas are compressed.

python examples/recipes/torchft_ddp.py
"""

import os

import torch
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.distributed_c10d import AllgatherOptions, ReduceOp
from torchft import DistributedDataParallel, Manager, Optimizer, ProcessGroupGloo
from torchft.coordination import LighthouseServer

import gradwire

STEPS = 200


class CompressedGloo(ProcessGroupGloo):
    """Sums float32 arrays of 4096 values or more as int8 frames, which all replicas gather.

    It keeps no residual: the replicas of the next step may be others. A replica sends its frame to
    each other one, so this is for a few replicas.
    """

    codec = "int8:bucket=256,ef=off"
    sent = raw = 0  # bytes

    def allreduce(self, tensors, opts):
        (values,) = tensors
        small = values.dtype != torch.float32 or values.numel() < 4096
        if small or opts.reduceOp != ReduceOp.SUM:
            return super().allreduce(tensors, opts)
        frame = gradwire.encode(values, self.codec)
        size = gradwire.max_encoded_size(self.codec, values.numel())
        message = torch.zeros(8 + size, dtype=torch.uint8)  # its length, the frame, zeros
        message[:8].view(torch.int64)[0] = len(frame)
        message[8 : 8 + len(frame)] = torch.frombuffer(bytearray(frame), dtype=torch.uint8)
        gathered = [torch.empty_like(message) for _ in range(self.size())]
        work = self.allgather([gathered], [message], AllgatherOptions())
        work.wait()
        values.zero_()
        for other in gathered:  # in the same order on each replica, so the sums are the same bits
            length = int(other[:8].view(torch.int64)[0])
            frame = other[8 : 8 + length].numpy()
            values += torch.from_numpy(gradwire.decode(frame)).view_as(values)
        self.sent += message.numel() * (self.size() - 1)
        self.raw += 2 * values.nbytes * (self.size() - 1) // self.size()  # a ring's
        return work


def train(replica: int, lighthouse: str) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="0")
    store = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 8))
    adamw = torch.optim.AdamW(model.parameters(), lr=3e-3)
    group = CompressedGloo()
    manager = Manager(
        pg=group,
        load_state_dict=lambda saved: model.load_state_dict(saved["model"]),
        state_dict=lambda: {"model": model.state_dict()},
        min_replica_size=2,
        rank=0,
        world_size=1,
        store_addr="127.0.0.1",
        store_port=store.port,
        lighthouse_addr=lighthouse,
        replica_id=f"replica_{replica}",
        hostname="127.0.0.1",
        use_async_quorum=False,
    )
    model_ddp = DistributedDataParallel(manager, model)
    optimizer = Optimizer(manager, adamw)
    target = torch.randn(64, 8)
    torch.manual_seed(1 + replica)
    while manager.current_step() < STEPS:
        inputs = torch.randn(32, 64)
        optimizer.zero_grad()  # finds out which replicas take part
        loss = nn.functional.cross_entropy(model_ddp(inputs), (inputs @ target).argmax(dim=1))
        loss.backward()
        optimizer.step()  # if no replica failed meanwhile
        if replica == 0 and manager.current_step() % 50 == 0:
            print(f"step {manager.current_step()}: loss {loss.item():.3f}", flush=True)
    if replica == 0:
        print(f"gathered {group.sent:,} bytes, {group.raw / group.sent:.2f} x less than raw")
    manager.shutdown(wait=False)


if __name__ == "__main__":
    lighthouse = LighthouseServer(bind="127.0.0.1:0", min_replicas=2)
    mp.spawn(train, args=(lighthouse.address(),), nprocs=2)
    lighthouse.shutdown()
