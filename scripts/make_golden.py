"""Writes all of tests/golden/, only with the plain Python code in spec/.

Run it by hand when the format changes on purpose, and read the difference before you keep it. No
test runs it, and it does not use the C++ code, so that golden files check that code independently.
The cases are in golden_cases/. Those of a codec are in golden_cases/codecs/, in a module with the
same name as in spec/payloads/. tests/golden/README.md explains the index.
"""

from __future__ import annotations

import json
import shutil
import zlib
from collections.abc import Callable, Iterator
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from golden_cases import containers, deltas, frames, packets
from golden_cases.inputs import GRADIENTS, TENSORS, take

# golden_cases puts spec/ on the path, so that these are found.
# isort: split
import common
import container as spec_container
import delta as spec_delta
import delta_encoder
import payloads
import reference as spec
import reference_encoder as encoder

ROOT = Path(__file__).resolve().parents[1]
GOLDEN = ROOT / "tests" / "golden"
# Tensors that every codec encodes, with their lengths.
EVERY_ENCODE = [("gradient", 0), ("gradient", 1), ("gradient", 39), ("zero", 39)]
EVERY_ENCODE += [("denormals", 7), ("huge", 6), ("nan", 3)]


class Writer:
    """Writes files in tests/golden and collects the index."""

    def __init__(self) -> None:
        kinds = ("encode", "decode", "deltas", "errors")
        self.index: dict[str, list[dict[str, Any]]] = {kind: [] for kind in kinds}

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


def codecs_with_cases() -> Iterator[tuple[payloads.Payload, Any]]:
    """Each codec and the module of its cases, or None."""
    for module_name, module in payloads.MODULES.items():
        if hasattr(module, "NUMBER"):
            name = f"golden_cases.codecs.{module_name}"
            yield module, import_module(name) if find_spec(name) else None


def write_encode(out: Writer) -> None:
    for name, tensor in TENSORS.items():
        out.file(f"encode/{name}.f32", tensor)
    for codec, cases in codecs_with_cases():
        plain = [(codec.NAME, *case) for case in EVERY_ENCODE] + getattr(cases, "ENCODE", [])
        for text, source, n in dict.fromkeys(plain):
            name = f"{file_name(text)}-{source}-{n}"
            frame = encoder.encode_frame(take(TENSORS[source], n), text)
            out.add(
                "encode",
                name=name,
                codec=text,
                n=n,
                input=f"encode/{source}.f32",
                frame=out.file(f"encode/{name}.frame", frame),
            )
        for title, text, values, residual in getattr(cases, "FEEDBACK", []):
            write_feedback(out, f"feedback-{title}", text, values, residual)


def write_feedback(
    out: Writer, name: str, codec: str, values: list[float], residual: list[float]
) -> None:
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


def without_payload(codec: payloads.Payload, n: int, flags: int = 0) -> bytes:
    return encoder.seal_frame(codec.NUMBER, *codec.parameters(codec.read({})), n, b"", flags)


def has_empty_payloads(codec: payloads.Payload) -> bool:
    return status_of("frame", without_payload(codec, 1)) == "ok"


def decode_frames() -> dict[str, bytes]:
    found = dict(frames.DECODE)
    for codec, cases in codecs_with_cases():
        found[codec.NAME] = encoder.encode_frame(GRADIENTS, codec.NAME)
        found[f"marker-{codec.NAME}"] = without_payload(codec, 3, spec.NON_FINITE_FLAG)
        if has_empty_payloads(codec):
            found[f"{codec.NAME}-nothing-sent"] = without_payload(codec, 7)
        for name, frame in getattr(cases, "DECODE", {}).items():
            found[f"{codec.NAME}-{name}"] = frame
    return found


def write_decode(out: Writer) -> None:
    for name, frame in decode_frames().items():
        values = spec.decode_frame(frame)
        out.add(
            "decode",
            name=name,
            frame=out.file(f"decode/{name}.frame", frame),
            n=len(values) // 4,
            values=out.file(f"decode/{name}.f32", values[: 4 * period(values)]),
        )
    for name, packet in packets.packets().items():
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
            direction=("push", "pull")[packet.direction],
            source=packet.source,
            step=packet.step,
            layout_digest=f"{packet.layout_digest:016x}",
            non_finite=report,
            frames=frames,
        )


def write_containers(out: Writer) -> None:
    for name, content in containers.containers().items():
        data = spec_container.encode_container(content)
        assert spec_container.parse_container(data) == content
        tensors = [
            {key: value for key, value in vars(tensor).items() if key != "data"}
            | {"data": out.file(f"decode/container-{name}-{i}.bytes", tensor.data)}
            for i, tensor in enumerate(content.tensors)
        ]
        out.add(
            "decode",
            name=f"container-{name}",
            container=out.file(f"decode/{name}.container", data),
            restores=content.kind,
            metadata=content.metadata,
            tensors=tensors,
        )


def write_deltas(out: Writer) -> None:
    def add(name: str, case: deltas.Case, data: bytes, exact: bool) -> None:
        base, result = case.arrays()
        assert spec_delta.apply(spec_delta.parse(data), base) == result, name
        out.add(
            "deltas",
            name=name,
            element=case.element,
            n=case.n,
            base=file_of(case.period),
            at=case.at,
            result=file_of(case.result),
            delta=out.file(f"deltas/{name}.delta", data),
            exact=exact,
        )

    def file_of(data: bytes) -> str:
        """A file for arrays that are the same."""
        return out.file(f"deltas/{zlib.crc32(data):08x}.bytes", data)

    for name, case in deltas.cases():
        add(name, case, delta_encoder.encode(case.element, *case.arrays()), True)
    for name, case, payload in deltas.others():
        changed = sum(map(bool, delta_encoder.steps_between(case.element, *case.arrays())))
        sealed = delta_encoder.seal(case.element, case.n, changed, *case.arrays(), payload)
        add(name, case, sealed, False)


def period(values: bytes) -> int:
    """The length of the shortest prefix that gives all values when it is repeated."""
    n = len(values) // 4
    if n <= 2048:
        return n
    return next(p for p in range(1, n + 1) if take(values[: 4 * p], n) == values)


def status_of(form: str, data: bytes) -> str:
    readers: dict[str, Callable[[bytes], object]] = {
        "frame": spec.decode_frame,
        "packet": spec.parse_packet,
        "container": spec_container.parse_container,
    }
    try:
        readers[form](data)
    except common.FormatError as error:
        return error.status
    return "ok"


def frame_errors() -> dict[str, tuple[str, bytes]]:
    found = frames.errors()
    for codec, cases in codecs_with_cases():
        marker = without_payload(codec, 2**40, spec.NON_FINITE_FLAG)
        found[f"{codec.NAME}-marker-2-40"] = ("limit_exceeded", marker)
        refused = "limit_exceeded" if has_empty_payloads(codec) else "corrupt_payload"
        found[f"{codec.NAME}-empty-2-40"] = (refused, without_payload(codec, 2**40))
        for status, broken in getattr(cases, "ERRORS", {}).items():
            found |= {f"{codec.NAME}-{name}": (status, data) for name, data in broken.items()}
    return found


def write_errors(out: Writer) -> None:
    broken = {"frame": frame_errors(), "packet": packets.errors(), "container": containers.errors()}
    for form, cases in broken.items():
        for name, (status, data) in cases.items():
            assert status_of(form, data) == status, (name, status_of(form, data))
            file = out.file(f"errors/{name}.{form}", data)
            out.add("errors", name=f"{form}-{name}", **{form: file}, status=status)


def write_delta_errors(out: Writer) -> None:
    for name, status, data, n in deltas.errors():
        assert spec_delta.status_of(data, bytes(2 * n)) == status, name
        file = out.file(f"errors/{name}.delta", data)
        out.add("errors", name=f"delta-{name}", delta=file, n=n, status=status)


def main() -> None:
    for folder in ("encode", "decode", "deltas", "errors"):
        shutil.rmtree(GOLDEN / folder, ignore_errors=True)
    out = Writer()
    write_encode(out)
    write_decode(out)
    write_containers(out)
    write_deltas(out)
    write_errors(out)
    write_delta_errors(out)
    out.file("index.json", (json.dumps(out.index, indent=1) + "\n").encode())
    counts = ", ".join(f"{len(cases)} {kind}" for kind, cases in out.index.items())
    size = sum(path.stat().st_size for path in GOLDEN.rglob("*") if path.is_file())
    print(f"{counts}, {size} bytes")


if __name__ == "__main__":
    main()
