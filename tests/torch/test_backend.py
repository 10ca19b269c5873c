"""The backend "gradwire": what it compresses is near the exact result, all else is exact."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from contextlib import nullcontext
from datetime import timedelta
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.distributed import TCPStore  # type: ignore[attr-defined] # PyTorch hides it

import backend_jobs
from cluster import Cluster
from gradwire import GradwireError
from gradwire.torch import register_backend
from gradwire.torch.backend.collective import Memories
from gradwire.torch.backend.process_group import GradwireGroup
from gradwire.torch.buckets.reduction import ExchangeWork

SCRIPT = """
import os, sys
import torch, torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
dist.init_process_group("gloo")
torch.manual_seed(0)
model = DistributedDataParallel(nn.Linear(256, 300))
model(torch.randn(4, 256)).square().mean().backward()
compressed = dist.group.WORLD.stats()["all_reduce"]["compressed"]
# One write of each rank, so that their lines don't mix.
os.write(1, f"{dist.get_backend()} {sys.argv[1]} {compressed}\\n".encode())
dist.destroy_process_group()
"""
# Results of at most this error relative to the largest value; 0: exact.
EXPECTED = {
    **dict.fromkeys(("sum", "average", "functional sum", "DTensor"), 0.01),
    **{f"reduce_scatter {op}": 0.01 for op in ("RedOpType.SUM", "RedOpType.AVG")},
    "functional reduce_scatter": 0.01,
    "bfloat16": 0.02,
    **dict.fromkeys(("max", "few", "integers", "all_gather"), 0.0),
}


@pytest.mark.parametrize("world", [1, 2, 4])
def test_large_sums_are_compressed_and_all_else_is_exact(cluster: Cluster, world: int) -> None:
    options = {"min_numel": 1000}
    ranks = cluster.run(world, backend_jobs.over_backend, "collectives", options)
    first = ranks[0][0]["found"]
    for rank, (answer, said) in enumerate(ranks):
        assert answer["found"].keys() == EXPECTED.keys()
        for name, (ours, exact) in answer["found"].items():
            error = np.abs(ours - exact).max() / np.abs(exact).max()
            if EXPECTED[name] == 0.0 or (world == 1 and name != "bfloat16"):
                assert error < 1e-6, name
            else:
                assert 1e-5 < error < EXPECTED[name] or world == 1, name
            if "reduce_scatter" not in name:
                np.testing.assert_array_equal(ours, first[name][0], "all ranks get the same bits")
        stats = answer["stats"]
        if world > 1:
            assert stats["all_reduce"]["compressed"] == 5
            assert stats["all_reduce"]["passed_on"] >= 3
            assert (
                stats["reduce_scatter"]["raw_bytes"] > 3.5 * stats["reduce_scatter"]["sent_bytes"]
            )
            assert ("gradwire compresses" in said) == (rank == 0)


def test_gathers_are_compressed_on_request(cluster: Cluster) -> None:
    options = {"all_reduce": None, "reduce_scatter": None, "all_gather": "bf16", "min_numel": 1000}
    for answer, _ in cluster.run(2, backend_jobs.over_backend, "collectives", options):
        ours, exact = answer["found"]["all_gather"]
        np.testing.assert_array_equal(ours, torch.from_numpy(exact).bfloat16().double().numpy())
        ours, exact = answer["found"]["sum"]
        np.testing.assert_allclose(ours, exact, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("world", [2, 4])
def test_values_that_are_not_finite_go_as_over_gloo(cluster: Cluster, world: int) -> None:
    """Exactly where they are, and no other value becomes NaN; monitored_barrier works, too."""
    options = {"min_numel": 1000, "all_gather": "int8:bucket=256"}
    ranks = cluster.run(world, backend_jobs.over_backend, "non-finite", options)
    for rank, (found, _) in enumerate(ranks):
        assert len(found) == world * 20
        for name, (ours, exact) in found.items():
            is_near = 0.02 if "bfloat16" in name else 1e-6
            np.testing.assert_allclose(ours, exact, rtol=is_near, atol=is_near, err_msg=name)
            if "scatter" not in name:
                np.testing.assert_array_equal(ours, ranks[0][0][name][0], f"{name}, rank {rank}")


@pytest.mark.parametrize("half", ["fp16", "bf16"])
def test_finite_values_stay_finite(cluster: Cluster, half: str) -> None:
    """Also those that the codec's type does not hold."""
    options = dict.fromkeys(("all_reduce", "reduce_scatter", "all_gather"), half)
    ranks = cluster.run(
        4, backend_jobs.over_backend, f"too large for {half}", {**options, "min_numel": 1000}
    )
    for found, _ in ranks:
        for name, (ours, exact) in found.items():
            np.testing.assert_allclose(ours, exact, rtol=0.02, atol=0.02, err_msg=name)


def test_parameters_are_summed_as_any_tensor(cluster: Cluster) -> None:
    options = {"all_reduce": "raw", "reduce_scatter": "raw", "min_numel": 1000}
    for is_right, _ in cluster.run(2, backend_jobs.over_backend, "reduce parameters", options):
        assert is_right


def test_states_are_restored_as_over_gloo(cluster: Cluster) -> None:
    """PyTorch asks the group for its devices."""
    for found, _ in cluster.run(2, backend_jobs.over_backend, "states", {"min_numel": 1000}):
        assert found == [True, False, True, True]


def test_groups_side_by_side_draw_apart(cluster: Cluster) -> None:
    """So the errors of replicas average out, as in HSDP."""
    options = {"all_reduce": "qsgd:bits=2", "min_numel": 1000}
    ranks = cluster.run(4, backend_jobs.over_backend, "draw side by side", options)
    values = [found for found, _ in ranks]
    assert torch.equal(values[0], values[1])
    assert torch.equal(values[2], values[3])
    assert not torch.equal(values[0], values[2])


@pytest.mark.parametrize("way", ["plain", "plain fsdp"], ids=["ddp", "fsdp"])
def test_trainings_run_over_it(cluster: Cluster, way: str) -> None:
    exact = cluster.run(4, backend_jobs.train, way)
    ranks = cluster.run(4, backend_jobs.over_backend, way, {"min_numel": 1000})
    for (_, values, stats), _ in ranks:
        assert values == ranks[0][0][1]
        assert sum(op["compressed"] for op in stats.values()) >= 8
    for rank, plain in zip(ranks, exact, strict=True):
        np.testing.assert_allclose(rank[0][0], plain[0], rtol=0.02)
        assert rank[0][1] != plain[1], "something must have been compressed"


def test_a_lost_rank_is_named(fragile_cluster: Cluster) -> None:
    fragile_cluster.start(3, backend_jobs.over_backend, "lose a rank", {"min_numel": 1000})
    for answer in fragile_cluster.collect(range(2), 120.0).values():
        assert "rank 2" in answer[0]


def test_a_sum_that_has_begun_waits_for_nobody(fragile_cluster: Cluster) -> None:
    options = {"min_numel": 1000}
    fragile_cluster.start(2, backend_jobs.over_backend, "send before waiting", options)
    for found, _ in fragile_cluster.collect(range(2), 60.0).values():
        assert found == pytest.approx(2 * 7 * backend_jobs.NUMEL, rel=0.01)


def test_exchanges_of_earlier_sizes_are_released(cluster: Cluster) -> None:
    """Each size has its own, so tensors of ever other sizes took ever more memory. The sums have
    the same bits as where none is released."""
    options = {"all_reduce": "qsgd:bits=2", "min_numel": 1000}
    for (few, all_kept), _ in cluster.run(2, backend_jobs.over_backend, "many sizes", options):
        assert (few[0], all_kept[0]) == (2, 5)
        for ours, expected in zip(few[1], all_kept[1], strict=True):
            assert torch.equal(ours, expected)


def test_ranks_with_other_sizes_are_named(cluster: Cluster) -> None:
    """Also by the group's error, by which torchft knows that it has to make another group."""
    options = {"min_numel": 9}
    for (before, *after), _ in cluster.run(2, backend_jobs.over_backend, "unlike sizes", options):
        assert not before
        for message in after:
            assert "rank 0 has" in message
            assert "rank 1 has" in message


def test_bad_arguments_are_refused() -> None:
    with pytest.raises(ValueError, match="min_numel is 0"):
        register_backend(min_numel=0)
    with pytest.raises(ValueError, match=r"dtypes has torch.float64; valid ones are torch.float32"):
        register_backend(dtypes=[torch.float64])
    with pytest.raises(ValueError, match="does not know whose values"):
        register_backend("3lc:ef=on")
    with pytest.raises(GradwireError, match="int9"):
        register_backend("int9")


def test_a_group_outside_a_world_keeps_a_residual_for_each_memory(cluster: Cluster) -> None:
    """What the ranks gave is what they got and what they still owe, for each of two tensors; also
    if a step between is not finite."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    ranks = cluster.run(2, backend_jobs.reduce_without_a_world, store.port, 5, 2)
    given, owed = (sum(rank[name] for rank in ranks) for name in ("given", "owed"))
    assert np.abs(owed).max() > 0.1
    for rank in ranks:
        np.testing.assert_array_equal(rank["summed"], ranks[0]["summed"])
        np.testing.assert_allclose(rank["summed"] + owed, given, atol=1e-4)


def test_a_group_has_no_numbers_that_nobody_counts() -> None:
    """`scalars()` of a group were zeros, and `log_to` wrote nothing: its numbers are in `stats()`,
    and in no steps."""
    for name in ("scalars", "log_to", "last_step", "explain"):
        assert not hasattr(GradwireGroup, name), name


@pytest.mark.parametrize("of_a_sum", [True, False])
def test_a_wait_ends_when_its_time_is_over(of_a_sum: bool) -> None:
    """As one of Gloo does, and the work goes on. An error that comes in time is raised."""
    future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    work = ExchangeWork(future, [])

    def end() -> None:
        if of_a_sum:
            future.set_result(torch.ones(1))
        else:
            future.set_exception(ValueError("the sum has failed"))  # type: ignore[arg-type]

    timer = threading.Timer(0.5, end)
    timer.start()
    with pytest.raises(RuntimeError, match=r"^Operation timed out!$"):
        work.wait(timedelta(milliseconds=10))
    with nullcontext() if of_a_sum else pytest.raises(ValueError, match="the sum has failed"):
        assert work.wait(timedelta(seconds=60))
    timer.join()


def test_memory_is_known_again_until_it_is_released() -> None:
    memories = Memories()
    whole = torch.zeros(10)
    assert [memories.number_of(t) for t in (whole, whole[5:], whole.view(2, 5))] == [0, 1, 0]
    for number in range(2, 50):
        assert memories.number_of(torch.zeros(10)) == number, "an address was taken for a tensor"
    assert memories.forget_released() == list(range(2, 50))
    assert memories.forget_released() == []
    assert memories.number_of(whole) == 0


def _torchrun(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2"]
    command += ["--master-port=0", "--rdzv-backend=c10d", "--rdzv-endpoint=127.0.0.1:0"]
    return subprocess.run(
        [*command, "-m", "gradwire.torch.run", *arguments],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
        env=os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"},
    )


def test_an_unchanged_script_runs_over_it(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    result = _torchrun("--codec", "bf16", str(script), "own-argument")
    assert result.returncode == 0, result.stderr
    assert result.stdout.count("own-argument 1") == 2
    assert "cpu:gradwire,cuda:gradwire" in result.stdout
    assert result.stderr.count("gradwire compresses all_reduce with bf16") == 1


SPAWNING = """
import subprocess, sys
import torch
import torch.multiprocessing as mp
from torch.distributed import all_reduce, destroy_process_group, init_process_group

def main(rank, store, numel):
    init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    all_reduce(torch.randn(numel))
    destroy_process_group()

if __name__ == "__main__":
    how, store, numel = sys.argv[1:]
    if how == "program":
        subprocess.run([sys.executable, __file__, "spawn", store, numel], check=True)
    else:
        mp.start_processes(main, (store, int(numel)), nprocs=2, start_method=how)
"""


def test_ranks_that_the_script_starts_run_over_it_or_it_says_so(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SPAWNING)
    compresses, nothing = "gradwire compresses all_reduce", "gradwire.torch.run: nothing was "
    cases = (
        ("spawn", "70000", compresses),
        ("fork", "70000", compresses),
        ("forkserver", "10", f"{nothing}compressed: no sum or average had 65,536 values"),
        ("program", "70000", f"{nothing}compressed: no process group was made in this process"),
    )
    running = [
        subprocess.Popen(
            [sys.executable, "-m", "gradwire.torch.run", script, how, tmp_path / how, numel],
            stderr=subprocess.PIPE,
            text=True,
            env=os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"},
        )
        for how, numel, _ in cases
    ]
    for process, (how, _, said) in zip(running, cases, strict=True):
        _, errors = process.communicate(timeout=240)
        assert process.returncode == 0, (how, errors)

        assert errors.count(said) == 1, (how, errors)


def test_the_launcher_refuses_what_cannot_be(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "gradwire.torch.run"]
    script = tmp_path / "train.py"
    script.write_text("import torch.distributed as d; d.init_process_group('mpi')")
    for arguments, said in (
        (["missing.py"], "there is no script missing.py"),
        (["--codec", "int9", str(script)], "int9"),
        ([str(script)], "takes the place of gloo and nccl"),
    ):
        result = subprocess.run([*command, *arguments], capture_output=True, text=True, check=False)
        assert result.returncode != 0
        assert said in result.stderr
