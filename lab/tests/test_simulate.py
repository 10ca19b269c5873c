"""`gradwire simulate`: bytes, growth with the ranks, memory, and what it says about nonsense."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import cli_runner
from gradwire._core import Exchange, GradwireError, Layout, ServerSide, Simulation, WorkerSide
from gradwire_lab.bench_data import load_data
from gradwire_lab.cli import progress
from gradwire_lab.cli.quantities import parse_count
from gradwire_lab.plan.cluster import PAYLOAD_BYTES, Cluster
from gradwire_lab.plan.predict import LayerBucket
from gradwire_lab.plan.profile import Layer, PlanError
from gradwire_lab.plan.simulate import check_ranks, free_memory, needed_memory, simulate
from test_plan import profile_of

VALUES = np.random.default_rng(0).standard_normal(1 << 18).astype(np.float32)
LAYERS = (Layer("a", (100, 300), 0.0), Layer("b", (300,), 0.0), Layer("c", (50, 101), 0.0))
BUCKETS = [LayerBucket(LAYERS, 0.0)]
NUMEL = BUCKETS[0].numel


TENSORS = [(layer.name, list(layer.dims)) for layer in LAYERS]


def exchanged_bytes(exchange: str, codec: str, gradients: list[np.ndarray]) -> list[int]:
    """What each rank sends in a step."""
    layout = Layout(TENSORS, len(gradients), codec)
    made = [Exchange(layout, rank, exchange) for rank in range(len(gradients))]
    return sent_by(made, gradients, 0)


def sent_by(
    made: list[Exchange | WorkerSide | ServerSide], gradients: list[np.ndarray], step: int
) -> list[int]:
    """Counted by the exchanges, whose messages are handed over one by one."""
    sent = [0] * len(made)
    for one, gradient in zip(made, gradients, strict=True):
        one.start(gradient.copy(), step)
    while not all(one.done for one in made):
        for rank, one in enumerate(made):
            for peer, message in one.outgoing():
                sent[rank] += message.size
                made[peer].receive(rank, message.copy())
    return sent


@pytest.mark.parametrize("exchange", ["sharded", "ring", "broadcast"])
@pytest.mark.parametrize("codec", ["raw", "int8", "3lc:s=1,coder=rice"])
def test_bytes_are_those_of_the_same_gradients(exchange: str, codec: str) -> None:
    ranks = 4
    gradients = VALUES[: ranks * NUMEL].reshape(ranks, NUMEL)
    done = simulate(Cluster(ranks, 1e9), codec, exchange, BUCKETS, VALUES, stride=NUMEL)
    sent = exchanged_bytes(exchange, codec, list(gradients))
    assert done.bytes_of_all == sum(sent)
    assert done.bytes_sent == max(sent)


@pytest.mark.parametrize("pulls", ["updates", "gradients"])
@pytest.mark.parametrize("codec", ["raw", "3lc:s=1,coder=rice", "terngrad"])
@pytest.mark.parametrize("servers", [1, 3])
def test_bytes_of_servers_are_those_of_the_same_gradients(
    servers: int, codec: str, pulls: str
) -> None:
    """In two steps, so that residuals count. The averages are the change of the model."""
    workers, steps = 3, 2
    layout = Layout(TENSORS, workers + servers, codec, servers=servers)
    made: list[Exchange | WorkerSide | ServerSide] = []
    for rank in range(workers):
        made.append(WorkerSide(layout, rank, lambda server, version: None, pulls=pulls))
    for rank in range(workers, workers + servers):
        update = None if pulls == "gradients" else lambda: None
        made.append(ServerSide(layout, rank, update, pulls=pulls))
    gradients = VALUES[: steps * workers * NUMEL].reshape(steps, workers, NUMEL)
    none = [np.zeros(NUMEL, np.float32)] * servers
    sent = np.array([sent_by(made, [*gradients[step], *none], step) for step in range(steps)])
    cluster = Cluster(workers, 1e9, servers=servers)
    exchange = "server" if pulls == "updates" else f"server:pulls={pulls}"
    done = simulate(cluster, codec, exchange, BUCKETS, VALUES, stride=NUMEL, steps=steps)
    assert done.bytes_of_all == sent.sum() / steps
    assert done.bytes_sent == max(sent.mean(axis=0))


def test_a_message_takes_its_frames_and_the_latency() -> None:
    """Two ranks, broadcast: one message each way at once, 4 bytes a value and 46 of headers."""
    bucket = LayerBucket((Layer("all", (1000, 10), 0.0),), 0.0)
    done = simulate(Cluster(2, 1e6, 0.01), "raw", "broadcast", [bucket], VALUES)
    size = 40_000 + 46
    frames = -(-size // PAYLOAD_BYTES)
    assert done.bytes_sent == size
    assert done.longest_way == 1
    assert done.seconds == pytest.approx((size + 66 * frames) * 8 / 1e6 + 0.01)


def test_a_burst_passes_at_once() -> None:
    """The message of a step is followed at once by that of the next, unless there is a pause."""
    bucket = LayerBucket((Layer("all", (1000, 10), 0.0),), 0.0)
    plain, full, empty, filled = (
        simulate(
            Cluster(2, 1e6, burst=burst), "raw", "broadcast", [bucket], VALUES, steps=steps,
            pause=pause,
        ).seconds
        for burst, steps, pause in ((0, 1, 0.0), (4542, 1, 0.0), (4542, 2, 0.0), (4542, 2, 0.5))
    )  # fmt: skip
    assert full == pytest.approx(plain - 4542 * 8 / 1e6)
    assert empty == pytest.approx((full + plain) / 2)
    assert filled == pytest.approx(full)


def test_codecs_are_asked_for_their_cost_once() -> None:
    asked: list[str] = []

    def cost(codec: str) -> tuple[float, float]:
        asked.append(codec)
        return 1e-6, 1e-6

    done = simulate(Cluster(4, None), "int8", "sharded", BUCKETS, VALUES, cost=cost)
    assert sorted(asked) == ["int8", "raw"], "tensors of one dimension go raw"
    assert done.seconds == pytest.approx(done.codec_seconds, rel=0.1)


def test_an_error_of_the_cost_function_is_raised() -> None:
    def cost(codec: str) -> tuple[float, float]:
        raise KeyError(codec)

    with pytest.raises(KeyError, match="int8"):
        simulate(Cluster(2, None), "int8", "sharded", BUCKETS, VALUES, cost=cost)


def test_gradients_must_be_finite_numbers() -> None:
    broken = VALUES.copy()
    broken[5] = np.nan
    with pytest.raises(PlanError, match="NaN"):
        simulate(Cluster(2, None), "int8", "sharded", BUCKETS, broken)


def test_more_ranks_than_the_memory_takes_are_refused_with_the_number_that_fits() -> None:
    memory = needed_memory(100, "int8", "sharded", BUCKETS)
    check_ranks(Cluster(100, None), "int8", "sharded", BUCKETS, memory)
    with pytest.raises(PlanError, match="100 ranks fit"):
        check_ranks(Cluster(101, None), "int8", "sharded", BUCKETS, memory)
    with pytest.raises(PlanError, match="up to 1024"):
        check_ranks(Cluster(1025, None), "int8", "sharded", BUCKETS, 10**15)
    assert free_memory() > 10**6


def test_servers_count_as_ranks() -> None:
    memory = needed_memory(100, "int8", "server", BUCKETS)
    check_ranks(Cluster(98, None, servers=2), "int8", "server", BUCKETS, memory)
    with pytest.raises(PlanError, match=r"99 ranks and 2 servers of .* 98 ranks fit"):
        check_ranks(Cluster(99, None, servers=2), "int8", "server", BUCKETS, memory)
    fits = r"1023 ranks and 2 servers: .* up to 1024 together; 1022 workers fit$"
    with pytest.raises(PlanError, match=fits):
        check_ranks(Cluster(1023, None, servers=2), "int8", "server", BUCKETS, 10**15)
    with pytest.raises(PlanError, match=r"1024 ranks and 1 server: .* 1023 workers fit"):
        check_ranks(Cluster(1024, None, servers=1), "int8", "server", BUCKETS, 10**15)
    with pytest.raises(PlanError, match=r"--servers 4: .* the model has 3"):
        check_ranks(Cluster(2, None, servers=4), "int8", "server", BUCKETS, 10**15)


@pytest.mark.without_sanitizers
@pytest.mark.parametrize(("ranks", "values"), [(8, 2_000_000), (128, 20_000)])
def test_a_simulation_takes_the_memory_that_was_said(ranks: int, values: int) -> None:
    """The growth of a process is at most what was said, and at least a third of it."""
    script = f"""
import numpy as np
from pathlib import Path
from gradwire_lab.plan.cluster import Cluster
from gradwire_lab.plan.predict import LayerBucket
from gradwire_lab.plan.profile import Layer
from gradwire_lab.plan.simulate import needed_memory, simulate
given = np.random.default_rng(0).standard_normal(100_000).astype(np.float32)
bucket = [LayerBucket((Layer("all", ({values}, 1), 0.0),), 0.0)]
peak = lambda: int(Path('/proc/self/status').read_text().partition('VmHWM:')[2].split()[0])
before = peak()
simulate(Cluster({ranks}, 1e9), "3lc:s=1,coder=rice", "sharded", bucket, given)
print(1024 * (peak() - before))
print(needed_memory({ranks}, "3lc:s=1,coder=rice", "sharded", bucket))
"""
    run = [sys.executable, "-c", script]
    taken, said = map(int, subprocess.run(run, check=True, capture_output=True).stdout.split())
    assert said / 3 <= taken <= said


INTERRUPTED = """
import signal, sys, threading, time
import numpy as np
from gradwire._core import GradwireError, Layout, Simulation
signal.signal(signal.SIGINT, signal.default_int_handler)
values = np.random.default_rng(0).standard_normal(100_000).astype(np.float32)
layout = Layout([("all", [600, 100])], 250, "qsgd:coder=elias")
running = Simulation("broadcast", 250, [(layout, 0.0)], values, bits_per_second=1e9)
def interrupt():
    time.sleep(0.3)
    began.append(time.monotonic())
    signal.raise_signal(signal.SIGINT)
began = []
threading.Thread(target=interrupt).start()
try:
    running.step()
except KeyboardInterrupt:
    print(time.monotonic() - began[0])
try:
    running.step()
except GradwireError as error:
    print(error)
"""


def test_ctrl_c_ends_a_step() -> None:
    """Which takes 17 s: each of 250 ranks decodes what all others send."""
    run = [sys.executable, "-c", INTERRUPTED]
    done = subprocess.run(run, check=True, capture_output=True, text=True)
    seconds, said = done.stdout.splitlines()
    assert float(seconds) < 5
    assert said == "a step of this simulation was interrupted"


def test_a_long_simulation_shows_its_progress(monkeypatch: pytest.MonkeyPatch) -> None:
    """On stderr, but not with --json."""
    arguments = (*RUN, "--values", "1k", "--bandwidth", "1gbit", "--ranks", "2,3")
    assert "steps" not in cli_runner.run(*arguments).err, "it takes less than ten seconds"
    monkeypatch.setattr(progress, "_SECONDS_BETWEEN_LINES", 0.0)
    said = cli_runner.run(*arguments).err.splitlines()
    assert [line.partition(" are done")[0] for line in said] == [
        "gradwire: 2 ranks: 1 of 2 steps",
        "gradwire: 3 ranks: 2 of 2 steps",
    ]
    assert cli_runner.run(*arguments, "--json").err == ""


def test_layouts_of_another_number_of_ranks_are_refused() -> None:
    layout = Layout([("a", [100, 100])], 3, "int8")
    with pytest.raises(GradwireError, match="the layout is of 3"):
        Simulation("sharded", 4, [(layout, 0.0)], VALUES, bits_per_second=1e9)


# The command

RUN = ("simulate", "--codec-time", "none", "--data", "synthetic", "--steps", 1)


def test_the_command_grows_with_the_ranks() -> None:
    document = cli_runner.run(
        *RUN, "--values", "20k", "--bandwidth", "100mbit", "--ranks", "2,4,8,16", "--json"
    ).json
    results = document["results"]
    assert [row["ranks"] for row in results] == [2, 4, 8, 16]
    assert all(row["longest_way"] == 2 for row in results)
    assert [row["messages"] for row in results] == [2 * n * (n - 1) for n in (2, 4, 8, 16)]
    seconds = [row["step_seconds"] for row in results]
    assert seconds == sorted(seconds)


def test_links_pass_a_burst_while_the_model_is_computed(tmp_path: Path) -> None:
    profile = profile_of(80_000, 2)
    profile.write(tmp_path / "p.json")
    whole, burst = (
        LayerBucket(profile.layers, profile.compute_seconds - profile.rest_seconds),
        12_500,
    )
    values = load_data("synthetic", 0).period
    for every in (1, 4):
        document = cli_runner.run(
            "simulate", "--codec-time", "none", "--data", "synthetic", "--steps", 3, "--json",
            "--profile", tmp_path / "p.json", "--bandwidth", "100mbit", "--ranks", "4",
            "--codec", "bf16", "--burst", burst, "--every", every,
        ).json  # fmt: skip
        assert document["cluster"]["burst"] == burst
        # It takes a millisecond to fill, so every step begins with full buckets.
        done = simulate(Cluster(4, 1e8, burst=burst), "bf16", "sharded", [whole], values)
        expected = profile.compute_seconds + (done.seconds - whole.ready) / every
        assert document["results"][0]["step_seconds"] == pytest.approx(expected)


def test_ranks_that_share_a_link_wait_for_it() -> None:
    alone, shared = (
        cli_runner.run(
            *RUN, "--values", 8 * 40960, "--bandwidth", "100mbit", "--ranks", "8", "--json",
            "--ranks-per-machine", per_machine, "--codec", "raw",
        ).json["results"][0]
        for per_machine in (1, 4)
    )  # fmt: skip
    # 4 ranks send to 4 others: 16 of 8 * 7 parts, where each link had 7.
    assert shared["step_seconds"] / alone["step_seconds"] == pytest.approx(16 / 7, rel=0.02)
    assert shared["local_bytes_sent"] > 0


def test_the_largest_simulation_has_servers() -> None:
    """A server's link takes 1023 pushes and sends 1023 pulls."""
    row = cli_runner.run(
        *RUN, "--values", 1000, "--bandwidth", "100mbit", "--ranks", 1023, "--codec", "raw",
        "--exchange", "server", "--servers", 1, "--json",
    ).json["results"][0]  # fmt: skip
    message = 4 * 1000 + 45
    assert row["messages"] == 2 * 1023
    assert row["bytes_sent"] == row["bytes_received"] == 1023 * message
    frames = -(-message // PAYLOAD_BYTES)
    seconds = 2 * 1023 * (message + 66 * frames) * 8 / 1e8
    assert row["step_seconds"] == pytest.approx(seconds, rel=0.01)


def test_local_steps_share_an_exchange(tmp_path: Path) -> None:
    arguments = ("--bandwidth", "100mbit", "--ranks", "4", "--codec", "bf16", "--json")
    plain, local = (
        cli_runner.run(*RUN, "--values", "20k", *arguments, "--every", every).json
        for every in (1, 4)
    )
    assert local["every"] == 4
    before, after = plain["results"][0], local["results"][0]
    assert after["step_seconds"] == pytest.approx(before["step_seconds"] / 4)
    assert after["bytes_sent"] == before["bytes_sent"], "of an exchange"
    profile = profile_of(80_000, 2)
    profile.write(tmp_path / "p.json")
    of_model = cli_runner.run(
        *RUN, "--profile", tmp_path / "p.json", *arguments, "--every", 4
    ).json["results"][0]
    whole = LayerBucket(profile.layers, 0.0)
    values = load_data("synthetic", 0).period
    done = simulate(Cluster(4, 1e8), "bf16", "sharded", [whole], values)
    expected = profile.compute_seconds + done.seconds / 4
    assert of_model["step_seconds"] == pytest.approx(expected)


@pytest.mark.parametrize(
    ("text", "values"),
    [("8.2M", 8_200_000), ("2.01M", 2_010_000), ("1.001M", 1_001_000), ("0.5k", 500), ("7", 7)],
)
def test_a_number_of_values_is_exact(text: str, values: int) -> None:
    assert parse_count(text, "--values") == values


@pytest.mark.parametrize(
    ("arguments", "needed"),
    [
        (["--bandwidth", "1gbit"], "--values 1M"),
        (["--values", "1k", "--profile", "p.json"], "give one of --values and --profile"),
        (["--values", "1k"], "--bandwidth 100mbit"),
        (["--values", "0", "--bandwidth", "1gbit"], "number from 1"),
        (["--values", "1k", "--bandwidth", "0"], "between 64kbit and 100gbit"),
        (["--values", "1k", "--bandwidth", "1gbit", "--ranks", "1"], "from 2"),
        (["--values", "1k", "--bandwidth", "1gbit", "--ranks", "4,0"], "cannot be 0 ranks: give"),
        (["--values", "1k", "--bandwidth", "1gbit", "--ranks", "two"], "such as 2,4,8"),
        (["--values", "1k", "--bandwidth", "1gbit", "--ranks", "2000"], "up to 1024"),
        (["--values", "1k", "--bandwidth", "1gbit", "--exchange", "star"], "; or server"),
        (["--values", "1k", "--bandwidth", "1gbit", "--codec", "zip"], "3lc"),
        (["--values", "1k", "--bandwidth", "1gbit", "--codec-time", "slow"], "measured, none"),
        (
            ["--values", "9M", "--bandwidth", "1gbit", "--memory", "1G", "--ranks=64"],
            "1 GB are allowed",
        ),
        (["--values", "10G", "--bandwidth", "1gbit", "--memory", "1G"], "not even 2 ranks fit"),
        (["--values", "1k", "--bandwidth", "1gbit", "--exchange", "server"], "--servers 1, or"),
        (["--values", "1k", "--bandwidth", "1gbit", "--servers", "0"], "greater than or equal to"),
        (["--values", "1k", "--bandwidth", "1gbit", "--burst", "-9"], "--burst -9: a link passes"),
        (["--values", "1k", "--bandwidth", "1gbit", "--burst", "4.5k"], "as an integer"),
        (["--values", "1k", "--bandwidth", "none", "--burst", "9"], "give --bandwidth a rate"),
        (["--values", "1k", "--bandwidth", "1gbit", "--servers", "1"], "not with sharded"),
        (
            [*("--values", "1k", "--bandwidth", "1gbit"), "--exchange=server", "--servers=2"],
            "a tensor lies whole on one server",
        ),
        (
            ["--values", "1k", "--bandwidth", "1gbit", "--seed", "1" + 20 * "0"],
            "less than or equal",
        ),
        (["--values", "1k", "--bandwidth", "1gbit", "--every", "0"], "greater than or equal to"),
        (
            [
                *("--values=1k", "--bandwidth=1gbit", "--exchange=server"),
                "--servers=1",
                "--every=2",
            ],
            "exchange in every step",
        ),
        (
            [*("--values=1k", "--bandwidth=1gbit"), "--exchange=server:staleness=1"],
            "staleness and --barrier tensor",
        ),
    ],
)
def test_nonsense_is_an_error_that_says_what_it_needs(arguments: list[str], needed: str) -> None:
    result = cli_runner.run("simulate", *arguments)
    assert result.code in (1, 2)
    said = " ".join(result.err.replace("│", " ").split())
    assert needed in said
    assert "Traceback" not in said
