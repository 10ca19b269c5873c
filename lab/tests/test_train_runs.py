"""`gradwire train` with real processes: results, failures, and no process that stays behind."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cli_runner import run
from processes import processes_of
from small_data import write_fashion_mnist

pytest.importorskip("torch")

from gradwire_lab.train import launcher, network
from gradwire_lab.train.errors import TrainError
from gradwire_lab.train.launcher import run_workers
from gradwire_lab.train.settings import TrainSettings

GRADWIRE = str(Path(sys.executable).with_name("gradwire"))
LENET_PARAMETERS = 61_706
FOREVER = 10**6  # steps
EIGHT_STEPS = ["--steps", "8", "--eval-every", "4", "--codec", "raw", "--codec", "3lc:s=1.5"]

why_not = network.why_not_shaped() if sys.platform == "linux" else "Linux only"
needs_namespaces = pytest.mark.skipif(why_not is not None, reason=f"LINKS NOT TESTED: {why_not}")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_fashion_mnist(tmp_path_factory.mktemp("data") / "fashion-mnist", 2000, 500)


def _training(folder: Path, workers: int = 2) -> list[str]:
    options = {"--workers": workers, "--batch": 8, "--data-dir": folder}
    return [GRADWIRE, "train", *(str(word) for pair in options.items() for word in pair)]


@pytest.fixture
def training(folder: Path) -> list[str]:
    """A command for two workers, to which tests append options."""
    return _training(folder)


def is_running(process: int) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def seconds_until_gone(processes: dict[int, int], limit: float = 30.0) -> float:
    """The seconds until the processes and their namespaces are gone."""
    own = Path("/proc/self/ns/net").stat().st_ino
    start = time.monotonic()
    while time.monotonic() - start < limit:
        used = set()
        for entry in Path("/proc").glob("[0-9]*/ns/net"):
            try:
                used.add(entry.stat().st_ino)
            except OSError:
                continue
        if not any(map(is_running, processes)) and not (set(processes.values()) - {own}) & used:
            return time.monotonic() - start
        time.sleep(0.05)
    return float("inf")


class Running:
    """A `gradwire train` that has begun to take steps."""

    def __init__(self, command: list[str]) -> None:
        self.process = subprocess.Popen(
            [*command, "--steps", str(FOREVER), "--eval-every", "2", "--codec", "3lc"],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            process_group=0,
            # A process that a shell started in the background ignores SIGINT, and so do its
            # children.
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        )
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith("3lc"):  # the line of a step
                break
        self.descendants = processes_of(self.process.pid)

    def end(self) -> str:
        """Waits for it to end; returns its stderr."""
        return self.process.communicate(timeout=30)[1]


@pytest.fixture
def running(
    training: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Running]:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    started = Running([*training, "--bandwidth", "100mbit" if why_not is None else "none"])
    yield started
    started.process.kill()
    started.process.communicate()


@pytest.fixture(scope="module")
def modelled(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, str]:
    """The report and stderr of a run that could not get its 10 Mbit/s links."""
    refusing = tmp_path_factory.mktemp("bin") / "unshare"
    refusing.write_text("#!/bin/sh\necho 'Operation not permitted' >&2\nexit 1\n")
    refusing.chmod(0o755)
    path = {"PATH": f"{refusing.parent}:{os.environ['PATH']}"}
    return report_of([*_training(folder), "--bandwidth", "10mbit", *EIGHT_STEPS], path)


@pytest.fixture(scope="module")
def shaped(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, str, Path]:
    """The report, stderr and plots of a run behind links of 100 Mbit/s."""
    plots = tmp_path_factory.mktemp("plots")
    links = ["--bandwidth", "100mbit", "--plots", str(plots)]
    return *report_of([*_training(folder), *links, *EIGHT_STEPS, "--codec", "ddp"]), plots


def report_of(command: list[str], environment: dict[str, str] | None = None) -> Any:
    result = subprocess.run(
        [*command, "--json", "-"],
        capture_output=True,
        text=True,
        env={**os.environ, **(environment or {})},
        timeout=120,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout), result.stderr


@pytest.mark.skipif(network.why_not_shaped(True) is not None, reason="LATENCY NOT TESTED")
def test_a_run_over_long_links_takes_as_long(folder: Path) -> None:
    """A step has a push and a pull, each of which travels 30 ms."""
    links = ["--bandwidth", "100mbit", "--latency", "30"]
    report, said = report_of([*_training(folder), *links, *EIGHT_STEPS])
    assert report["links"]["latency_ms"] == 30
    assert "100mbit and 30 ms each way" in said
    for result in report["results"]:
        assert result["replicas_identical"]
        assert result["seconds"] > 8 * 2 * 0.03


@needs_namespaces
def test_a_shaped_run_counts_what_its_links_count(shaped: tuple[Any, str, Path]) -> None:
    report, said, plots = shaped
    raw, small, ddp = report["results"]
    assert report["times"] == "measured"
    assert report["links"] == {
        "bandwidth": "100mbit",
        "latency_ms": 0.0,
        "shaped": True,
        "modelled": False,
        "note": "",
    }
    plain = LENET_PARAMETERS * 4 * 8 // 2  # pushed in 8 steps: half of the values
    for result in report["results"]:
        assert result["replicas_identical"]
        assert [e["step"] for e in result["evaluations"]] == [4, 8]
        assert len(result["loss"]) == 8
    assert plain < raw["push_bytes"] < 1.02 * plain
    assert plain < raw["pull_bytes"] < 1.02 * plain
    # The interface also sees headers (5 %), acknowledgements and barriers.
    for result, most in ((raw, 1.15), (small, 2.5)):
        counted = result["push_bytes"] + result["pull_bytes"]
        assert counted < result["link"]["sent"] < most * counted
    assert 2 * plain < ddp["link"]["sent"] < 2 * plain * 1.15
    assert 0.97 < raw["ratio"] < 1.0
    assert small["ratio"] > 10
    # At 100 Mbit/s the raw bytes cannot have been faster.
    assert raw["seconds"] > 2 * plain * 8 / 100e6
    written = sorted(path.name for path in plots.iterdir())
    assert written == [
        *("accuracy.png", "accuracy_of_steps.png", "bits.png", "frontier.png", "loss.png")
    ]
    for word in ("100mbit", "estimate", "raw", "3lc:s=1.5", "speed-", "bit-identical"):
        assert word in said


def test_without_the_right_times_are_modelled(modelled: tuple[Any, str]) -> None:
    report, said = modelled
    raw, small = report["results"]
    assert report["times"] == "modelled"
    assert "not permitted" in report["links"]["note"]
    assert "WARNING" in said
    assert "MODELLED" in said
    assert raw["link"] is None
    wire = (raw["push_bytes"] + raw["pull_bytes"]) * 8 / 10e6
    assert wire < raw["seconds"] < wire + raw["measured_seconds"]
    assert raw["seconds"] != raw["measured_seconds"]
    assert small["speedup"] == raw["seconds"] / small["seconds"]


@needs_namespaces
def test_links_change_times_and_nothing_else(
    shaped: tuple[Any, str, Path], modelled: tuple[Any, str]
) -> None:
    """Two runs with one seed, on different networks: the same losses, the same bytes."""
    for one, other in zip(shaped[0]["results"], modelled[0]["results"], strict=False):
        for name in ("codec", "final", "loss", "push_bits", "pull_bits"):
            assert one[name] == other[name]


@needs_namespaces
def test_workers_of_a_machine_share_a_link(folder: Path) -> None:
    """So rings inside the machines do not burden it, whatever their codec."""
    rings = "hierarchical:between=ring,within=ring,ranks=2"
    links = ["--bandwidth", "100mbit", "--exchange", rings]
    report, said = report_of([*_training(folder, workers=4), *links, *EIGHT_STEPS])
    assert "100mbit each way, every machine behind a link of its own" in said
    for result, most in zip(report["results"], (1.15, 2.5), strict=True):
        assert result["replicas_identical"]
        assert result["hook_of_rank"][1]["local_bytes"] > 0
        # The mean of the workers, of which every second speaks for its machine.
        between = 2 * (result["push_bytes"] + result["pull_bytes"])
        assert between < result["link"]["sent"] < most * between


def test_under_torchrun_it_joins_the_ranks_that_are_there(folder: Path) -> None:
    run = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--no-python"]
    command = [GRADWIRE, "train", "--batch", "4", "--steps", "4", "--data-dir", str(folder)]
    codecs = ["--codec", "ddp", "--codec", "3lc"]
    report, said = report_of([*run, "--standalone", *command, *codecs])
    assert report["settings"]["workers"] == 2
    assert [result["codec"] for result in report["results"]] == ["ddp", "3lc"]
    assert all(result["replicas_identical"] for result in report["results"])
    assert len(report["results"][1]["hook_of_rank"]) == 2
    assert said.count("speed-") == 1  # one rank reports


SLOW_TO_LET_GO = """
import sys, threading, time, torch, torch.distributed as dist
from gradwire.cli import main

class Slow:
    def __del__(self):
        if threading.current_thread() is threading.main_thread():
            return
        slow.append(True)
        for _ in range(1000):
            time.sleep(0.001)

slow = []

def destroy_process_group(group=None, original=dist.destroy_process_group):
    while group is None and not slow:  # until the group's thread is the last to release it
        values = torch.ones(1 << 20)
        values.slow = Slow()
        work = dist.all_reduce(values, async_op=True)
        del values, work
        time.sleep(0.001)
    original(group)

dist.destroy_process_group = destroy_process_group
sys.exit(main(sys.argv[1:]))
"""


def test_it_ends_well_though_a_thread_of_the_group_is_slow(folder: Path) -> None:
    """Python ends such a thread in the middle of C++, which aborts the process."""
    options = ["train", "--batch", "4", "--steps", "2", "--codec", "ddp", "--data-dir", str(folder)]
    place = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    result = subprocess.run(
        [sys.executable, "-c", SLOW_TO_LET_GO, *options],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
        env=os.environ | {"GLOO_SOCKET_IFNAME": "lo"} | place,
    )
    assert "terminate" not in result.stderr
    assert result.returncode == 0, result.stderr
    assert "speed-" in result.stdout


def test_a_server_is_a_process_after_the_workers(folder: Path) -> None:
    settings = TrainSettings(
        codecs=("raw",),
        exchange="server",
        workers=1,
        bandwidth=None,
        data_dir=folder,
        steps=2,
        eval_every=2,
        batch=4,
    )
    events: dict[int, dict[str, Any]] = {0: {}, 1: {}}
    run_workers(
        settings,
        settings.runs(),
        shaped=False,
        on_event=lambda rank, event: events[rank].update({event["event"]: event}),
    )
    records = [record for rank in (0, 1) for record in events[rank]["records"]["records"]]
    assert [record.rank for record in records] == [0, 1]
    worker, server = (record.hook for record in records)
    assert worker is not None
    assert server is not None
    assert (worker["role"], server["role"]) == ("worker", "server")
    assert worker["push_bytes"] == server["push_bytes"] > 0
    assert "ready" in events[0]
    assert "ready" not in events[1]  # a server does not measure its speed


BAD_ENDS = """
import atexit, os, time

def end():
    try:
        os.mkdir({flag!r})
    except FileExistsError:
        time.sleep(600)
    os.abort()

atexit.register(end)
"""


def test_a_bad_end_costs_no_result(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The worker that ends first aborts, the other one stays until it is killed."""
    (tmp_path / "sitecustomize.py").write_text(BAD_ENDS.format(flag=str(tmp_path / "aborted")))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(launcher, "_SECONDS_TO_LEAVE", 5.0)
    settings = TrainSettings(
        codecs=("ddp",), workers=2, bandwidth=None, data_dir=folder, steps=2, eval_every=2, batch=4
    )
    lines: dict[int, str] = {}
    ranks: list[int] = []

    def note(rank: int, event: dict[str, Any]) -> None:
        ranks.extend(record.rank for record in event.get("records", ()))
        if "line" in event:
            lines[rank] = event["line"]

    run_workers(settings, settings.runs(), shaped=False, on_event=note)
    assert sorted(ranks) == [0, 1]
    delivered = "after it had delivered everything"
    assert sorted(lines.values()) == [
        f"was killed by signal 6 (SIGABRT) {delivered}",
        f"was killed by signal 9 (SIGKILL) {delivered}: it did not end within 5 s",
    ]


def test_a_killed_worker_is_named_and_the_others_end(running: Running) -> None:
    workers = [p for p in running.descendants if "worker" in Path(f"/proc/{p}/cmdline").read_text()]
    assert len(workers) == 2
    os.kill(max(workers), signal.SIGKILL)
    said = running.end()
    assert running.process.returncode == 1
    # Worker 0 has reported its first step; worker 1 may not have done so yet.
    place = r"in the run of 3lc(, after step \d+)?;"
    assert re.search(rf"worker 1 was killed by signal 9 \(SIGKILL\) {place}", said)
    assert seconds_until_gone(running.descendants) < 5


@pytest.mark.long
def test_a_run_goes_on_without_a_backup_worker_that_dies(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next run has all workers again."""
    next_event = launcher._Worker.next_event
    killed: list[int] = []

    def kill_once(worker: launcher._Worker) -> dict[str, Any] | None:
        event = next_event(worker)
        if not killed and worker.rank == 1 and worker.steps >= 3:
            worker.process.kill()
            killed.append(worker.steps)
        return event

    monkeypatch.setattr(launcher._Worker, "next_event", kill_once)
    options = ["--data-dir", str(folder), "--workers", "3", "--bandwidth", "none", "--batch", "4"]
    options += ["--steps", "200", "--eval-every", "100", "--codec", "raw", "--codec", "3lc:s=1.00"]
    options += ["--exchange", "server", "--backup-workers", "1"]
    result = run("train", *options, "--json", "-")
    first, second = result.json["results"]
    (why,) = first["lost_workers"]
    assert why.startswith("worker 1 was killed by signal 9 (SIGKILL) in the run of raw, after step")
    assert f"raw: {why}; the run went on without it." in " ".join(result.err.split())
    assert [evaluation["step"] for evaluation in first["evaluations"]] == [100, 200]
    assert first["replicas_identical"]
    assert first["hook_of_rank"][1] is None
    assert first["hook_of_rank"][3]["lost_workers"] == [1]
    assert second["lost_workers"] == []
    assert None not in second["hook_of_rank"]
    assert len(second["loss"]) == 200


@pytest.mark.long
def test_more_dead_workers_than_backups_end_the_run(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    next_event = launcher._Worker.next_event

    def kill(worker: launcher._Worker) -> dict[str, Any] | None:
        event = next_event(worker)
        if worker.rank in (1, 2) and worker.steps >= 3:
            worker.process.kill()
        return event

    monkeypatch.setattr(launcher._Worker, "next_event", kill)
    options = ["--data-dir", str(folder), "--workers", "3", "--bandwidth", "none", "--batch", "4"]
    options += ["--steps", "10000", "--eval-every", "10000", "--codec", "raw"]
    options += ["--exchange", "server", "--backup-workers", "1"]
    result = run("train", *options)
    assert result.code == 1
    assert "was killed by signal 9 (SIGKILL) in the run of raw, after step" in result.err


@pytest.mark.parametrize(
    ("number", "status"),
    [(signal.SIGINT, 130), (signal.SIGTERM, -signal.SIGTERM)],
    ids=["ctrl-c", "sigterm"],
)
def test_an_interrupt_ends_everything(
    running: Running, number: signal.Signals, status: int, tmp_path: Path
) -> None:
    assert len(running.descendants) >= 2
    assert list(tmp_path.glob("gradwire-*"))
    os.kill(running.process.pid, number)
    running.end()
    assert running.process.returncode == status
    assert seconds_until_gone(running.descendants) < 5
    assert not list(tmp_path.glob("gradwire-*"))


def test_everything_ends_with_a_killed_launcher(running: Running) -> None:
    assert len(running.descendants) >= 2
    os.kill(running.process.pid, signal.SIGKILL)
    running.end()
    assert seconds_until_gone(running.descendants) < 10


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--model", "vgg"], "valid are lenet, mlp, resnet8, resnet20, resnet56, resnet110, gpt"),
        (["--data", "mnist"], "valid are fashion-mnist, cifar10, text"),
        (["--bandwidth", "fast"], "valid are 10mbit, 100mbit, 1gbit, none"),
        (["--codec", "4lc"], "valid names are"),
        (["--rules", "fc*"], "PATTERN=CODEC"),
        (["--data-dir", "/nonexistent"], "dataset-fashion-mnist"),
    ],
)
def test_what_cannot_be_run_is_said_at_once(
    options: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    from gradwire.cli import main

    with pytest.raises(SystemExit) as ended:
        main(["train", *options])
    assert ended.value.code in (1, 2)
    printed = " ".join(capsys.readouterr().err.replace("│", " ").split())
    assert said in printed


def test_the_message_of_a_worker_that_cannot_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The launcher shows the message of the worker instead of a traceback. Files of the working
    folder are no modules of the worker."""
    (tmp_path / "random.py").write_text("raise ImportError('the file of the working folder')")
    monkeypatch.chdir(tmp_path)
    settings = TrainSettings(
        codecs=("ddp",), workers=1, bandwidth=None, data_dir=tmp_path, steps=1, eval_every=1
    )
    started = []

    def start(*arguments: Any, popen: Any = subprocess.Popen, **options: Any) -> Any:
        started.append(popen(*arguments, **options))
        return started[-1]

    monkeypatch.setattr(subprocess, "Popen", start)
    with pytest.raises(TrainError, match="dataset-fashion-mnist") as caught:
        run_workers(settings, settings.runs(), shaped=False, on_event=lambda rank, event: None)
    assert "Traceback" not in str(caught.value)
    assert len(started) == 1
    assert not is_running(started[0].pid)


def test_more_fragments_than_layers_end_the_training_before_its_first_run(
    training: list[str],
) -> None:
    local = ["--exchange", "sharded", "--compress", "updates", "--every", "30"]
    command = [*training, *local, "--steps", "60", "--eval-every", "60", "--fragments", "9"]
    command += ["--bandwidth", "none"]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ended.returncode == 1
    assert "the model has 5 layers, and a layer is not cut: take fragments=5" in ended.stderr
    assert "of 3" not in ended.stdout  # no run has begun


def test_a_signal_without_a_name_is_described() -> None:
    assert launcher.describe_end(3) == "ended with exit status 3"
    assert launcher.describe_end(-9) == "was killed by signal 9 (SIGKILL)"
    assert launcher.describe_end(-40) == "was killed by signal 40"
