"""The tables of docs/results/reliability.md, from the results of cells."""

from __future__ import annotations

import json
import re
import textwrap
from pathlib import Path

from faults import BY_NAME, FAULTS, Fault
from judge import Outcome, Seen, blamed, find_problems, resumes_exactly

WAYS = {
    "hook-sharded": "DDP hook, `sharded`",
    "hook-ring": "DDP hook, `ring`",
    "hook-terngrad": "DDP hook, `terngrad`",
    "hook-hierarchical": "DDP hook, `hierarchical`",
    "hook-broadcast": "DDP hook, `broadcast`",
    "sharded-optimizer": "`ShardedOptimizer`",
    "local-steps": "`LocalSteps`",
    "local-steps-fragments": "`LocalSteps`, `fragments=2, delay=1`",
    "sparse-loco": "`LocalSteps`, `**sparse_loco()`",
    "pulse-loco": "`LocalSteps`, `**pulse_loco()`",
    "servers": "`ServerOptimizer`, a worker",
    "servers-server": "`ServerOptimizer`, the server",
    "fsdp": "`FullyShardComm`",
    "fsdp-weights": "`FullyShardComm`, `weights=`",
    "hsdp": "`FullyShardComm`, two replicas of two shards",
    "hsdp-rank-1": "the same, with rank 1 as the victim",
    "backend": "backend `gradwire`",
    "local-steps-go-on": '`LocalSteps`, `on_lost="continue"`',
    "servers-go-on": '`ServerOptimizer`, `on_lost="continue"`',
    "mpi": "MPI, all-reduce",
}
# What gradwire cannot see: messages of others, and of whose model and step values are.
NOT_NOTICED = {
    (
        "fsdp",
        "bit-flipped",
    ): "in weights that PyTorch gathers itself; with `weights=` gradwire does",
    **dict.fromkeys(
        [("hsdp", "bit-flipped"), ("hsdp-rank-1", "bit-flipped")],
        "in what PyTorch sends inside a replica; between replicas gradwire does",
    ),
    ("backend", "old-checkpoint"): "as over Gloo itself; compare the steps in the program",
    ("mpi", "old-checkpoint"): "as with MPI's own all-reduce; compare the steps in the program",
}
_OF_GRADWIRE = ("Peer", "Damaged", "Expelled", "Store", "Gradwire")
_BEGIN, _END = "<!-- tables: begin -->\n", "<!-- tables: end -->\n"
_NOT_RUN = "not run"
Rows = dict[tuple[str, str], str]


def write_tables(results: Path, page: Path) -> None:
    """Ways that have no results in the folder keep the rows that they have in the page."""
    replace_tables(page, make_tables(results, read_rows(page.read_text())))


def read_rows(page: str) -> Rows:
    """The rows of the page's tables by the section, "" before the first one, and the way."""
    rows, section = {}, ""
    for line in page.partition(_BEGIN)[2].partition(_END)[0].splitlines():
        if line.startswith("### "):
            section = line.removeprefix("### ")
        elif line.startswith("| "):
            rows[section, line.split(" | ")[0].removeprefix("| ")] = line
    return rows


def replace_tables(page: Path, tables: str) -> None:
    """Replaces what stands between the marks of the page."""
    text = page.read_text()
    before, rest = text.split(_BEGIN)
    _, after = rest.split(_END)
    page.write_text(before + _BEGIN + "\n" + tables + "\n" + _END + after)


def make_tables(results: Path, before: Rows) -> str:
    """before: rows of ways that have no results."""
    outcomes = read_outcomes(results)
    ways = {way for way, _ in outcomes}
    rows = {key: row for key, row in before.items() if key[1] not in {WAYS[way] for way in ways}}
    for way in ways:
        rows["", WAYS[way]] = _overview_row(way, outcomes)
    for (way, fault), outcome in outcomes.items():
        rows[fault, WAYS[way]] = _row([WAYS[way], *_details(outcome, BY_NAME[fault])])
    head = ["", *(f"[{fault.name}](#{fault.name})" for fault in FAULTS)]
    sections = [_table(head, _rows_of("", rows)), *(_section(fault, rows) for fault in FAULTS)]
    missing = [
        f"{words} ({', '.join(absent)})"
        for words in WAYS.values()
        if (absent := [f.name for f in FAULTS if (f.name, words) not in rows])
    ]
    absent_cells = f"Not run: {'; '.join(missing)}." if missing else "Every cell was run."
    sections.append(_wrap(absent_cells))
    return "\n\n".join(sections) + "\n"


def read_outcomes(results: Path) -> dict[tuple[str, str], Outcome]:
    """By way and fault, judged anew."""
    outcomes = {}
    for way in WAYS:
        for fault in FAULTS:
            path = results / way / f"{fault.name}.json"
            if path.exists():
                outcome = Outcome.from_dict(json.loads(path.read_text()))
                outcome.problems = find_problems(outcome, fault, model_without_fault(results, way))
                outcomes[way, fault.name] = outcome
    return outcomes


def model_without_fault(results: Path, way: str) -> str:
    """The digest."""
    digest: str = json.loads((results / way / "none.json").read_text())["ranks"][0]["digest"]
    return digest


def _overview_row(way: str, outcomes: dict[tuple[str, str], Outcome]) -> str:
    return _row([WAYS[way], *(_brief(outcomes.get((way, f.name)), f) for f in FAULTS)])


def _rows_of(section: str, rows: Rows) -> list[str]:
    return [rows[section, words] for words in WAYS.values() if (section, words) in rows]


def _table(head: list[str], rows: list[str]) -> str:
    return "\n".join([_row(head), _row(["---"] * len(head)), *rows])


def _brief(outcome: Outcome | None, fault: Fault) -> str:
    if outcome is None:
        return _NOT_RUN
    if outcome.problems:
        return "**WRONG**" if _limit(outcome) is None else "**not noticed**"
    statuses = [seen.status for seen in outcome.ranks]
    if not any(statuses):
        exact = resumes_exactly(outcome.way) or not fault.needs_checkpoint
        return "unchanged" if exact else "alike"
    if 0 in statuses:
        return "goes on"
    others = _others(outcome)
    return f"stops, {_seconds(others)}"


def _section(fault: Fault, rows: Rows) -> str:
    words = fault.words[0].upper() + fault.words[1:]
    head = ["way", "the other ranks", "after", "exit", "the victim", "after", "exit", "the model"]
    own = _rows_of(fault.name, rows)
    table = _table(head, own) if own else f"{_NOT_RUN.capitalize()}."
    must = _wrap(f"{words}. Right is: {fault.must.value}.")
    return "\n".join([f"### {fault.name}", "", must, "", table])


def _details(outcome: Outcome, fault: Fault) -> list[str]:
    others, victim = _others(outcome), outcome.ranks[outcome.victim]
    model = _model(outcome, fault)
    if outcome.problems and (limit := _limit(outcome)):
        model = f"**broken, and not noticed**: {limit}"
    elif outcome.problems:
        model += f" **WRONG: {'; '.join(outcome.problems)}**"
    return [*_seen(others), *_seen([victim]), model]


def _seen(ranks: list[Seen]) -> list[str]:
    """What they see, when they end, exit status."""
    said = list(dict.fromkeys(_shorten(seen) for seen in ranks))
    statuses = list(dict.fromkeys(str(seen.status) for seen in ranks))
    return ["; ".join(said), _seconds(ranks), ", ".join(statuses)]


def _shorten(seen: Seen) -> str:
    """The kind of error and the ranks that it blames."""
    if seen.said is None and seen.status < 0:
        return f"signal {-seen.status}"
    if seen.said is None:
        warned = [match[0] for text in seen.warned if (match := re.match(r"\w+LostWarning", text))]
        return ", ".join(f"`{name}`" for name in dict.fromkeys(warned)) or "nothing"
    kinds = re.findall(r"\b([A-Z]\w+(?:Error|Exception))\b", seen.said)
    # C++ wraps an error of gradwire in a RuntimeError; the name of the original comes later.
    own = [kind for kind in kinds if kind.startswith(_OF_GRADWIRE)]
    plain = re.sub(r"\S*/(?=\S)", "", seen.said.removeprefix("Error: ").partition(" (")[0])
    kind = (own or kinds or [plain])[0]
    ranks = sorted(blamed(seen.said)) if kinds else []
    return f"`{kind}`" + (f": rank {', '.join(map(str, ranks))}" if ranks else "")


def _limit(outcome: Outcome) -> str | None:
    return NOT_NOTICED.get((outcome.way, outcome.fault))


def _model(outcome: Outcome, fault: Fault) -> str:
    digests = {seen.digest for seen in outcome.ranks if seen.status == 0}
    if not digests:
        whole = "" if not outcome.checkpoints else f"; {outcome.checkpoints} checkpoints are whole"
        return f"none{whole}"
    if len(digests) > 1:
        return "differs between ranks"
    if any(seen.status != 0 for seen in outcome.ranks):
        return "the same on all that go on"
    if fault.needs_checkpoint and not resumes_exactly(outcome.way):
        return "the same on all ranks"
    return "the same bits as without the fault"


def _others(outcome: Outcome) -> list[Seen]:
    return [seen for rank, seen in enumerate(outcome.ranks) if rank != outcome.victim]


def _seconds(ranks: list[Seen]) -> str:
    """To the error, or to the end of a rank that has none."""
    times = [seen.seconds if seen.said is None else seen.spoke or seen.seconds for seen in ranks]
    first, last = min(times), max(times)
    return f"{last} s" if first == last else f"{first} to {last} s"


def _wrap(text: str) -> str:
    return textwrap.fill(text, 100, break_long_words=False, break_on_hyphens=False)


def _row(cells: list[str]) -> str:
    return f"| {' | '.join(cell.replace('|', '/') for cell in cells)} |"
