"""Pictures of the layers: bits a value of each tensor, and which went raw."""

from __future__ import annotations

from dataclasses import dataclass

from gradwire_lab.train.page.figure import Figure, Trace, label_of, log_axis
from gradwire_lab.train.report import Report, RunResult

_MOST_NAMED = 60  # tensors whose names fit beside their bars


@dataclass
class LayerTraffic:
    """What all ranks together encoded of a tensor, and why it went raw; empty: it did not."""

    numel: int
    values_pushed: int = 0
    push_payload_bytes: int = 0
    values_pulled: int = 0
    pull_payload_bytes: int = 0
    reason: str = ""

    @property
    def push_bits(self) -> float | None:
        return 8 * self.push_payload_bytes / self.values_pushed if self.values_pushed else None

    @property
    def pull_bits(self) -> float | None:
        return 8 * self.pull_payload_bytes / self.values_pulled if self.values_pulled else None


def layers_of(result: RunResult) -> dict[str, LayerTraffic]:
    """The traffic of each tensor, by its name; in files that lack it, the tensors that went raw."""
    layers: dict[str, LayerTraffic] = {}
    for hook in result.hook_of_rank:
        for tensor in (hook or {}).get("tensors", ()):
            layer = layers.setdefault(tensor["name"], LayerTraffic(tensor["numel"]))
            for name in vars(layer).keys() & tensor.keys() - {"numel"}:
                setattr(layer, name, getattr(layer, name) + tensor[name])
    for hook in result.hook_of_rank:
        for tensor in (hook or {}).get("raw_tensors", ()):
            layer = layers.setdefault(tensor["name"], LayerTraffic(tensor["numel"]))
            layer.reason = tensor["reason"]
    return layers


def draw_layers(report: Report) -> list[Figure]:
    """A picture for each codec: its first run."""
    first = [results[0] for results in report.by_codec().values()]
    return [_draw(report, result, layers) for result in first if (layers := layers_of(result))]


def _draw(report: Report, result: RunResult, layers: dict[str, LayerTraffic]) -> Figure:
    named = len(layers) <= _MOST_NAMED
    names = list(layers)
    traces: list[Trace] = []
    for index, way, symbol in ((1, "push", "circle"), (2, "pull", "diamond")):
        bits = [getattr(layer, f"{way}_bits") for layer in layers.values()]
        if any(value is not None for value in bits):
            marks = ["raw" if layer.reason else "" for layer in layers.values()]
            dots = {"type": "scatter", "mode": "markers+text", "name": way, "meta": index}
            dots |= {"text": marks, "textposition": "middle left", "x": bits, "y": names}
            traces.append(dots | {"marker": {"symbol": symbol, "size": 9}})
    rows = [
        (name, f"{layer.numel:,}", _bits(layer.push_bits), _bits(layer.pull_bits), layer.reason)
        for name, layer in layers.items()
    ]
    return Figure(
        f"Bits a value of each layer, {label_of(report, result)}",
        _describe(layers, is_counted=bool(traces)),
        traces,
        {
            "xaxis": log_axis("bits a value", traces, "x"),
            "yaxis": {"autorange": "reversed", "showticklabels": named, "dtick": 1},
            "height": 150 + (22 if named else 8) * len(names),
        },
        ("tensor", "values", "bits pushed", "bits pulled", "went raw because"),
        rows,
    )


def _describe(layers: dict[str, LayerTraffic], is_counted: bool) -> str:
    raw = {name: layer for name, layer in layers.items() if layer.reason}
    reasons = "; ".join(
        f"{', '.join(names)} ({reason})" for reason, names in _by_reason(raw).items()
    )
    if not is_counted:
        return f"{len(raw)} tensors went raw: {reasons}. The bits of each tensor were not counted."
    values = sum(layer.numel for layer in layers.values())
    text = f"{len(layers)} tensors with {values:,} values; "
    if raw:
        share = sum(layer.numel for layer in raw.values()) / values
        text += f"{len(raw)} went raw, {share:.2%} of the values: {reasons}"
    else:
        text += "none went raw although another codec was set"
    return f"{text}. Payloads alone, without headers and without steps that go raw as a whole."


def _by_reason(raw: dict[str, LayerTraffic]) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for name, layer in raw.items():
        found.setdefault(layer.reason, []).append(name)
    return found


def _bits(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g}"
