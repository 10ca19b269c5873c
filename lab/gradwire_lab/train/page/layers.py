"""Pictures of the layers: bits a value of each tensor, and which went raw."""

from __future__ import annotations

from typing import Any

from gradwire_lab.train.page.figure import Figure, Trace, log_axis
from gradwire_lab.train.report import Report, RunResult

_MOST_NAMED = 60  # tensors whose names fit beside their bars
_COUNTED = ("values_pushed", "push_payload_bytes", "values_pulled", "pull_payload_bytes")


def layers_of(result: RunResult) -> dict[str, dict[str, Any]]:
    """What all ranks together encoded of each tensor, by its name, and the "reason" why it went
    raw; empty: it did not. In files that lack it, the tensors that went raw."""
    layers: dict[str, dict[str, Any]] = {}
    for key in ("tensors", "raw_tensors"):
        for tensor in [t for hook in result.hook_of_rank if hook for t in hook.get(key, ())]:
            fresh = {"numel": tensor["numel"], "reason": "", **dict.fromkeys(_COUNTED, 0)}
            layer = layers.setdefault(tensor["name"], fresh)
            layer["reason"] = tensor.get("reason", "")
            for name in _COUNTED:
                layer[name] += tensor.get(name, 0)
    return layers


def _bits(layer: dict[str, Any], way: str) -> float | None:
    values: int = layer[f"values_{way}ed"]
    return 8 * layer[f"{way}_payload_bytes"] / values if values else None


def draw_layers(report: Report) -> list[Figure]:
    """A picture for each codec: its first run."""
    first = [results[0] for results in report.by_codec().values()]
    return [_draw(report, result, layers) for result in first if (layers := layers_of(result))]


def _draw(report: Report, result: RunResult, layers: dict[str, dict[str, Any]]) -> Figure:
    named = len(layers) <= _MOST_NAMED
    bits = {way: [_bits(layer, way) for layer in layers.values()] for way in ("push", "pull")}
    marks = ["raw" if layer["reason"] else "" for layer in layers.values()]
    traces: list[Trace] = []
    for index, way, symbol in ((1, "push", "circle"), (2, "pull", "diamond")):
        if any(value is not None for value in bits[way]):
            dots = {"type": "scatter", "mode": "markers+text", "name": way, "meta": index}
            dots |= {"text": marks, "textposition": "middle left"}
            dots |= {"x": bits[way], "y": list(layers)}
            traces.append(dots | {"marker": {"symbol": symbol, "size": 9}})
    texts = [["-" if value is None else f"{value:.4g}" for value in way] for way in bits.values()]
    rows = [
        (name, f"{layer['numel']:,}", *of_both, layer["reason"])
        for (name, layer), *of_both in zip(layers.items(), *texts, strict=True)
    ]
    return Figure(
        f"Bits a value of each layer, {report.label(result)}",
        _describe(layers, is_counted=bool(traces)),
        traces,
        {
            "xaxis": log_axis("bits a value", traces, "x"),
            "yaxis": {"autorange": "reversed", "showticklabels": named, "dtick": 1},
            "height": 150 + (22 if named else 8) * len(layers),
        },
        ("tensor", "values", "bits pushed", "bits pulled", "went raw because"),
        rows,
    )


def _describe(layers: dict[str, dict[str, Any]], is_counted: bool) -> str:
    raw: dict[str, list[str]] = {}  # names, by the reason
    for name, layer in layers.items():
        if layer["reason"]:
            raw.setdefault(layer["reason"], []).append(name)
    count = sum(map(len, raw.values()))
    reasons = "; ".join(f"{', '.join(names)} ({reason})" for reason, names in raw.items())
    if not is_counted:
        return f"{count} tensors went raw: {reasons}. The bits of each tensor were not counted."
    values = sum(layer["numel"] for layer in layers.values())
    text = f"{len(layers)} tensors with {values:,} values; "
    if raw:
        share = sum(layer["numel"] for layer in layers.values() if layer["reason"]) / values
        text += f"{count} went raw, {share:.2%} of the values: {reasons}"
    else:
        text += "none went raw although another codec was set"
    return f"{text}. Payloads alone, without headers and without steps that go raw as a whole."
