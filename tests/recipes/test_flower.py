"""Both ends of Flower's messages: what the client keeps, the server sees, and what is refused."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

pytest.importorskip("flwr", reason="flwr is not installed: scripts/test.sh recipes installs it")

from flwr.app import Array, ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.compat.common.parameter import ndarrays_to_parameters
from flwr.compat.common.recorddict_compat import parameters_to_arrayrecord
from flwr.serverapp import Grid
from flwr.serverapp.strategy import FedAdam, FedAvg
from flwr.supercore.task_identity import TaskIdentity

from gradwire.contrib.flower import CompressedGrid, CompressionMod

Train = Callable[[dict[str, Any]], dict[str, Any]]


@pytest.fixture(autouse=True)
def _task() -> Iterator[None]:
    TaskIdentity.run_id, TaskIdentity.node_id, TaskIdentity.task_id = 1, 0, 1
    yield
    TaskIdentity._run_id = TaskIdentity._node_id = TaskIdentity._task_id = None


class Clients(Grid):
    """Clients in this process that all train with `train`."""

    run = None

    def __init__(self, nodes: int, mod: Callable[..., Any], train: Train) -> None:
        self.mod, self.train = mod, train
        self.contexts = {
            n: Context(run_id=1, node_id=n, node_config={}, state=RecordDict(), run_config={})
            for n in range(1, nodes + 1)
        }

    def set_run(self, run: Any) -> None: ...

    def get_node_ids(self) -> list[int]:
        return list(self.contexts)

    create_message: Any = None
    push_messages: Any = None
    pull_messages: Any = None

    def send_and_receive(self, messages: Any, *, timeout: float | None = None) -> list[Any]:
        def app(message: Any, context: Any) -> Any:
            arrays = {n: a.numpy() for n, a in message.content["arrays"].items()}
            trained = ArrayRecord({n: Array(v) for n, v in self.train(arrays).items()})
            metrics = MetricRecord({"num-examples": 1})
            content = RecordDict({"arrays": trained, "metrics": metrics})
            return Message(content, reply_to=message)

        return [self.mod(m, self.contexts[m.metadata.dst_node_id], app) for m in messages]


def ask(grid: Any, model: dict[str, Any], nodes: tuple[int, ...] = (1,)) -> list[dict[str, Any]]:
    record = RecordDict({"arrays": ArrayRecord({n: Array(v) for n, v in model.items()})})
    messages = [Message(record, node, "train") for node in nodes]
    replies = grid.send_and_receive(messages)
    return [{n: a.numpy() for n, a in reply.content["arrays"].items()} for reply in replies]


def make_model() -> dict[str, Any]:
    weights = np.random.default_rng(0).standard_normal((40, 50)).astype(np.float32)
    return {"w": weights, "b": np.ones(5, np.float32), "count": np.array([3], np.int64)}


def test_what_the_server_lacks_is_the_residual_of_the_client() -> None:
    step = np.random.default_rng(1).standard_normal((40, 50)).astype(np.float32)
    clients = Clients(2, CompressionMod("3lc:s=1.00"), lambda m: m | {"w": m["w"] + step})
    grid = CompressedGrid(clients, "raw")
    model = make_model()
    seen = np.zeros_like(step)
    for _ in range(5):
        first, _ = ask(grid, model, (1, 2))
        seen += first["w"] - model["w"]
    residual = clients.contexts[1].state["gradwire.residuals"]["w"].numpy().reshape(40, 50)
    np.testing.assert_allclose(seen + residual, 5 * step, atol=1e-4)
    assert np.abs(residual).max() > 0.1, "the codec lost nothing"


def test_the_server_never_gets_the_error_of_the_encoded_model() -> None:
    clients = Clients(1, CompressionMod("raw"), lambda m: m | {"w": m["w"] + 1})
    model = make_model()
    (trained,) = ask(CompressedGrid(clients), model)
    np.testing.assert_allclose(trained["w"], model["w"] + 1, atol=1e-5)


def test_small_and_integer_arrays_arrive_as_they_are() -> None:
    def train(model: dict[str, Any]) -> dict[str, Any]:
        assert model["b"].tolist() == [1.0] * 5
        return model | {"b": model["b"] * 2, "count": model["count"] + 1}

    (trained,) = ask(CompressedGrid(Clients(1, CompressionMod(), train)), make_model())
    assert trained["b"].tolist() == [2.0] * 5
    assert trained["count"].tolist() == [4]
    assert trained["count"].dtype == np.int64


def test_integers_that_a_strategy_averages_as_floats_may_be_integers_again() -> None:
    """Every client failed from the second round on: PyTorch's BatchNorm counts its batches."""

    def train(model: dict[str, Any]) -> dict[str, Any]:
        count = model["count"].astype(np.int64)  # as load_state_dict makes it
        return model | {"w": model["w"] + 1, "count": count + 1}

    grid = CompressedGrid(Clients(2, CompressionMod("raw"), train), "raw")
    arrays = ArrayRecord({name: Array(values) for name, values in make_model().items()})
    result = FedAvg(fraction_evaluate=0.0).start(grid, arrays, num_rounds=3).arrays
    np.testing.assert_allclose(result["w"].numpy(), make_model()["w"] + 3, atol=1e-5)
    assert result["count"].numpy().tolist() == [6]


def test_a_model_in_float64_arrives_though_clients_train_in_float32() -> None:
    clients = Clients(1, CompressionMod(), lambda m: m | {"w": m["w"].astype(np.float32) + 1})
    model = {**make_model(), "w": make_model()["w"].astype(np.float64)}
    (trained,) = ask(CompressedGrid(clients), model)
    np.testing.assert_allclose(trained["w"], model["w"] + 1, atol=1e-5)
    assert trained["w"].dtype == np.float32


def test_a_strategy_that_computes_in_float64_is_compressed_in_every_round() -> None:
    """FedAdam's model is float64 after the first round, and nothing was compressed any more."""
    dtypes = []

    def train(model: dict[str, Any]) -> dict[str, Any]:
        dtypes.append({name: str(values.dtype) for name, values in model.items()})
        return model | {"w": model["w"] + 1}

    grid = CompressedGrid(Clients(1, CompressionMod(), train))
    strategy = FedAdam(fraction_evaluate=0.0, min_train_nodes=1, min_available_nodes=1, eta=0.1)
    arrays = ArrayRecord({name: Array(values) for name, values in make_model().items()})
    result = strategy.start(grid, arrays, num_rounds=3).arrays
    assert result["w"].dtype == "float64"
    assert [(each["w"], each["b"]) for each in dtypes] == [("float32", "float32")] * 3
    assert min(grid.to_clients.ratio, grid.from_clients.ratio) > 3


def test_both_ways_are_counted_without_the_other() -> None:
    grid = CompressedGrid(Clients(2, CompressionMod("3lc:s=1.00"), lambda m: m))
    ask(grid, make_model(), (1, 2))
    assert grid.to_clients.raw == grid.from_clients.raw == 2 * (4 * 2000 + 4 * 5 + 8)
    assert grid.to_clients.sent > 2 * 2000 > grid.from_clients.sent > 0


def test_other_arrays_than_the_model_are_refused() -> None:
    grid = CompressedGrid(Clients(1, CompressionMod(), lambda m: {"w": m["w"][:1]}))
    with pytest.raises(ValueError, match=r"they differ in \['b', 'count', 'w'\]"):
        ask(grid, make_model())


def test_messages_of_the_older_interface_are_refused() -> None:
    """It was said that an array cannot be reshaped."""
    values = make_model()["w"]
    arrays = parameters_to_arrayrecord(ndarrays_to_parameters([values]), keep_input=True)
    message = Message(RecordDict({"fitins.parameters": arrays}), 1, "train")
    clients = Clients(1, CompressionMod(), lambda m: m)
    with pytest.raises(ValueError, match=r"older interface \(server_fn, NumPyClient\)"):
        clients.send_and_receive([message])


def test_a_codec_with_a_residual_is_refused_for_models() -> None:
    with pytest.raises(ValueError, match="ef=off"):
        CompressedGrid(Clients(1, CompressionMod(), lambda m: m), "3lc:s=1.00")


def test_an_end_without_its_part_names_it() -> None:
    """Flower's own code then reads the frame."""
    model = make_model()
    bare = Clients(1, lambda message, context, app: app(message, context), lambda m: m)
    with pytest.raises(
        TypeError, match=r"this end lacks gradwire\.contrib\.flower's CompressionMod or C"
    ):
        ask(CompressedGrid(bare), model)
    with pytest.raises(TypeError, match="or CompressedGrid"):
        ask(Clients(1, CompressionMod(), lambda m: m), model)
