"""Flower: models to the clients and updates from them are compressed, both ways.

python examples/recipes/flower_fedavg.py

`flwr run` takes `server_app` and `client_app` of this file. It is run by itself here: the clients
are called in this process, one after the other, with the messages of a real run.
"""

import torch
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg
from flwr.supercore.task_identity import TaskIdentity
from torch import nn

from gradwire.contrib.flower import CompressedGrid, CompressionMod

ROUNDS = 10
client_app = ClientApp(mods=[CompressionMod()])  # the new line of clients
server_app = ServerApp()


def make_model() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 8))


@client_app.train()
def train(message: Message, context: Context) -> Message:
    model = make_model()
    model.load_state_dict(message.content["arrays"].to_torch_state_dict())
    sgd = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    target = torch.randn(64, 8, generator=torch.Generator().manual_seed(0))  # alike everywhere
    own = torch.Generator().manual_seed(1 + context.node_id)  # each client has its own data
    inputs = torch.randn(640, 64, generator=own)
    total = 0.0
    for batch in inputs.split(32):
        loss = nn.functional.cross_entropy(model(batch), (batch @ target).argmax(dim=1))
        sgd.zero_grad()
        loss.backward()
        sgd.step()
        total += loss.item()
    metrics = MetricRecord({"loss": total / 20, "num-examples": 640})
    content = {"arrays": ArrayRecord(model.state_dict()), "metrics": metrics}
    return Message(RecordDict(content), reply_to=message)


@server_app.main()
def main(grid: Grid, context: Context) -> None:
    torch.manual_seed(0)
    grid = CompressedGrid(grid, "int8:bucket=256,ef=off")  # the new line of the server
    arrays = ArrayRecord(make_model().state_dict())
    result = FedAvg(fraction_evaluate=0.0).start(grid, arrays, num_rounds=ROUNDS)
    for number, metrics in result.train_metrics_clientapp.items():
        print(f"round {number}: loss {metrics['loss']:.3f}")
    for way, traffic in ("to", grid.to_clients), ("from", grid.from_clients):
        print(f"{way} clients: {traffic.sent:,} bytes, {traffic.ratio:.2f} x less than raw")


class OneProcess(Grid):
    """Calls the clients one after the other. A client's context outlives the rounds."""

    run = None

    def __init__(self, nodes: int) -> None:
        # As a runtime of Flower does.
        TaskIdentity.run_id, TaskIdentity.node_id, TaskIdentity.task_id = 1, 0, 1
        self.contexts = {
            node: Context(run_id=1, node_id=node, node_config={}, state=RecordDict(), run_config={})
            for node in range(1, nodes + 1)
        }

    def set_run(self, run): ...

    def get_node_ids(self):
        return list(self.contexts)

    def create_message(self, content, message_type, dst_node_id, group_id, ttl=None):
        return Message(content, dst_node_id, message_type, ttl=ttl, group_id=group_id)

    def push_messages(self, messages): ...

    def pull_messages(self, message_ids): ...

    def send_and_receive(self, messages, *, timeout=None):
        return [client_app(m, self.contexts[m.metadata.dst_node_id]) for m in messages]


if __name__ == "__main__":
    server = Context(run_id=1, node_id=0, node_config={}, state=RecordDict(), run_config={})
    server_app(OneProcess(2), server)
