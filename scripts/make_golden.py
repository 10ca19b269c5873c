"""Writes tests/golden/ anew, with spec/reference.py and spec/reference_encoder.py alone.

Run by hand when the format changes on purpose; look at the difference before you keep it. No test
runs it, and it asks the C++ code nothing: golden files are a second opinion, not a recording.
The cases stand in golden_encode.py, golden_decode.py and golden_errors.py beside it. What the index
means stands in tests/golden/README.md.
"""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "spec"))

import common  # noqa: E402
import payloads  # noqa: E402
import reference as spec  # noqa: E402
import reference_encoder as encoder  # noqa: E402
from golden_decode import decode_frames, packets  # noqa: E402
from golden_encode import FEEDBACK, INPUTS, PLAIN, take  # noqa: E402
from golden_errors import frame_errors, packet_errors  # noqa: E402
from golden_frames import SIGNALLING_NAN  # noqa: E402

GOLDEN = ROOT / "tests" / "golden"


class Writer:
    """Writes files below tests/golden and gathers the index."""

    def __init__(self) -> None:
        self.index: dict[str, list[dict[str, Any]]] = {"encode": [], "decode": [], "errors": []}

    def file(self, name: str, data: bytes) -> str:
        path = GOLDEN / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
        return name

    def add(self, kind: str, **case: Any) -> None:
        names = [known["name"] for known in self.index[kind]]
        assert case["name"] not in names, case["name"]
        self.index[kind].append(case)


def file_name(text: str) -> str:
    return text.replace(":", "-").replace("=", "").replace(",", "-").replace(".", "_")


def write_encode(out: Writer) -> None:
    tensors = {name: common.to_bytes(values) for name, values in INPUTS.items()}
    tensors["special"] += SIGNALLING_NAN
    for name, tensor in tensors.items():
        out.file(f"encode/{name}.f32", tensor)
    for codec, source, n in PLAIN:
        name = f"{file_name(codec)}-{source}-{n}"
        out.add(
            "encode",
            name=name,
            codec=codec,
            n=n,
            input=f"encode/{source}.f32",
            frame=out.file(
                f"encode/{name}.frame", encoder.encode_frame(take(tensors[source], n), codec)
            ),
        )
    for title, codec, values, residual in FEEDBACK:
        name = f"feedback-{title}"
        before = common.to_bytes(residual)
        if "residual=bf16" in codec:
            before = common.widen_bf16(common.narrow_tensor(before))
        tensor = common.to_bytes(values)
        frame, after = encoder.encode_with_residual(tensor, codec, before)
        out.add(
            "encode",
            name=name,
            codec=codec,
            n=len(values),
            input=out.file(f"encode/{name}.f32", tensor),
            residual_in=out.file(f"encode/{name}.in.f32", before),
            residual_out=out.file(f"encode/{name}.out.f32", after),
            frame=out.file(f"encode/{name}.frame", frame),
        )


def write_decode(out: Writer) -> None:
    for name, frame in decode_frames().items():
        values = spec.decode_frame(frame)
        n = len(values) // 4
        out.add(
            "decode",
            name=name,
            frame=out.file(f"decode/{name}.frame", frame),
            n=n,
            values=out.file(f"decode/{name}.f32", values[: 4 * period(values)]),
        )
    for name, packet in packets().items():
        data = encoder.encode_packet(packet)
        assert spec.parse_packet(data) == packet
        report = vars(packet.report) if packet.report else None
        frames = [
            {
                "codec": payloads.CODECS[frame.codec].NAME,
                "n": frame.n,
                "payload_bytes": len(frame.payload),
                "values": out.file(f"decode/packet-{name}-{i}.f32", spec.decode(frame)),
            }
            for i, frame in enumerate(packet.frames)
        ]
        out.add(
            "decode",
            name=f"packet-{name}",
            packet=out.file(f"decode/{name}.packet", data),
            role=("push", "pull")[packet.kind],
            source=packet.source,
            step=packet.step,
            layout_digest=f"{packet.layout_digest:016x}",
            non_finite=report,
            frames=frames,
        )


def period(values: bytes) -> int:
    """The shortest start that gives all values when it is repeated; all of them for few."""
    n = len(values) // 4
    if n <= 2048:
        return n
    return next(p for p in range(1, n + 1) if take(values[: 4 * p], n) == values)


def status_of(form: str, data: bytes) -> str:
    try:
        if form == "frame":
            spec.decode_frame(data)
        else:
            spec.parse_packet(data)
    except common.FormatError as error:
        return error.status
    return "ok"


def write_errors(out: Writer) -> None:
    for form, cases in (("frame", frame_errors()), ("packet", packet_errors())):
        for name, (status, data) in cases.items():
            assert status_of(form, data) == status, (name, status_of(form, data))
            file = out.file(f"errors/{name}.{form}", data)
            out.add("errors", name=f"{form}-{name}", **{form: file}, status=status)


def main() -> None:
    for folder in ("encode", "decode", "errors"):
        shutil.rmtree(GOLDEN / folder, ignore_errors=True)
    out = Writer()
    write_encode(out)
    write_decode(out)
    write_errors(out)
    out.file("index.json", (json.dumps(out.index, indent=1) + "\n").encode())
    counts = ", ".join(f"{len(cases)} {kind}" for kind, cases in out.index.items())
    size = sum(path.stat().st_size for path in GOLDEN.rglob("*") if path.is_file())
    print(f"{counts}, {size} bytes")


if __name__ == "__main__":
    main()
