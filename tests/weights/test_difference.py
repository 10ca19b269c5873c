"""diff, patch and changes: exact for any bits, dtype and layout."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gradwire.weights import (
    DamagedVersionError,
    Publisher,
    StaleBaseError,
    Subscriber,
    WeightsError,
    changes,
    diff,
    fold,
    patch,
    prune,
    unflatten,
)
from gradwire.weights.difference import fold_updates, make_update
from gradwire.weights.folder import MemoryFolder
from gradwire.weights.tensors import View
from gradwire.weights.update import Update, read_update
from states import assert_same, bits, state_of

DTYPES = (
    *(torch.bfloat16, torch.float16, torch.float32, torch.float64, torch.complex64, torch.bool),
    *(torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.uint16, torch.uint64),
    *(torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e8m0fnu),
)
LAYOUTS = ("contiguous", "transposed", "strided", "offset")


def draw_bits(dtype: torch.dtype, shape: tuple[int, ...], seed: int) -> torch.Tensor:
    """Any bits: NaN with payloads, -0 and denormals too."""
    random = np.random.default_rng(seed)
    made = torch.empty(shape, dtype=dtype)
    size = made.numel() * made.element_size()
    most = 2 if dtype is torch.bool else 256
    if size:
        drawn = random.integers(0, most, size, dtype=np.uint8)
        made.reshape(-1).view(torch.uint8).numpy()[:] = drawn
    return made


def lay_out(values: torch.Tensor, layout: str) -> torch.Tensor:
    """The same values, elsewhere in memory."""
    if layout == "transposed" and values.dim() > 1:
        return values.transpose(0, -1).contiguous().transpose(0, -1)
    if layout == "strided":
        room = torch.zeros(*values.shape, 3, dtype=values.dtype)
        room[..., 1] = values
        return room[..., 1]
    if layout == "offset":
        room = torch.zeros(values.numel() + 5, dtype=values.dtype)
        room[5:] = values.reshape(-1)
        return room[5:].view(values.shape)
    return values.clone()


@st.composite
def pairs(draw: st.DrawFn) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """A state and a later one, in which tensors may be gone, new, or of another kind."""
    # Tensors that are new are of PyTorch because this one is.
    old, new = {"first": torch.ones(1)}, {"first": torch.zeros(1)}
    for number in range(draw(st.integers(0, 4))):
        dtype = draw(st.sampled_from(DTYPES))
        shape = tuple(draw(st.lists(st.integers(0, 5), max_size=3)))
        seed = draw(st.integers(0, 5))
        fate = draw(st.sampled_from(("same", "changed", "few", "gone", "new", "another")))
        before = draw_bits(dtype, shape, seed)
        after = before.clone() if fate in ("same", "few") else draw_bits(dtype, shape, seed + 1)
        if fate == "few" and after.numel():
            after.view(-1)[seed % after.numel()] = draw_bits(dtype, (1,), seed + 2)[0]
        if fate == "another":
            after = draw_bits(draw(st.sampled_from(DTYPES)), (*shape, 2), seed)
        name = f"layer {number}"
        if fate != "new":
            old[name] = lay_out(before, draw(st.sampled_from(LAYOUTS)))
        if fate != "gone":
            new[name] = lay_out(after, draw(st.sampled_from(LAYOUTS)))
    return old, new


@settings(deadline=None)
@given(pairs())
def test_patched_tensors_are_the_new_ones(
    pair: tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]],
) -> None:
    old, new = pair
    kept = {name: old[name] for name in old.keys() & new.keys()}
    delta = diff(old, new)
    assert delta == diff(old, new, threads=2)
    patch(old, delta)
    assert_same(old, new)
    for name, values in kept.items():
        fits = (values.dtype, values.shape) == (new[name].dtype, new[name].shape)
        assert (old[name] is values) == fits, "tensors are written in place"


@settings(deadline=None)
@given(pairs())
def test_changes_are_those_of_the_delta(
    pair: tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]],
) -> None:
    old, new = pair
    before = {name: bits(values) for name, values in old.items()}
    found = {name: values.clone().contiguous() for name, values in old.items()}
    for name, indices, values in changes(old, diff(old, new)):
        fits = name in found and (found[name].dtype, found[name].shape) == (
            (new[name].dtype, new[name].shape)
        )
        if not fits:
            found[name] = torch.zeros(new[name].shape, dtype=new[name].dtype)
        assert indices.dtype == torch.int64
        assert values.dtype == new[name].dtype
        target = found[name].view(-1)
        if fits and target.numel():
            wide = [bits(one) for one in target]
            now = [bits(one) for one in new[name].reshape(-1)]
            differing = [at for at, one in enumerate(wide) if one != now[at]]
            assert indices.tolist() == differing
        for at, value in zip(indices.tolist(), values, strict=True):
            target[at] = value
    assert {name: bits(values) for name, values in old.items()} == before
    for name, values in new.items():
        if name in found and found[name].shape == values.shape:
            assert bits(found[name]) == bits(values)


NUMPY = ("float16", "float32", "float64", "int8", "int64", "uint16", "bool", "complex64")


@pytest.mark.parametrize("dtype", NUMPY)
def test_arrays_of_numpy(dtype: str) -> None:
    random = np.random.default_rng(0)
    old = {"x": random.integers(0, 2, (4, 6)).astype(dtype)[:, ::2], "y": np.zeros(5, dtype)}
    new = {"x": old["x"].copy(), "z": np.ones(2, dtype), "s": np.ones((), dtype)}
    new["x"][1, 2] = 1 - old["x"][1, 2].real.astype(np.int8)
    (sparse,) = [entry for entry in changes(old, diff(old, new)) if entry[0] == "x"]
    assert sparse[1].tolist() == [5]
    assert sparse[2].dtype == old["x"].dtype
    patch(old, diff(old, new))
    assert_same(old, new)


@pytest.mark.parametrize("dtype", ["f8", "i8", "u8", "c8", "f4", "i2", "?"])
def test_elements_that_changed_are_counted_once(dtype: str) -> None:
    before = np.arange(1000).astype(dtype)
    after = before.copy()
    after[:300].view(np.uint8)[:] ^= 1 if dtype == "?" else 255  # all bytes of each
    publisher = Publisher(MemoryFolder())
    publisher.publish({"x": before})
    assert publisher.publish({"x": after}).share_changed == 0.3
    update = read_update(diff({"x": before}, {"x": after}), "it")
    assert update.changed == 300
    folded = fold_updates(update, read_update(diff({"x": after}, {"x": after[::-1]}), "it"), 1)
    assert 300 <= folded.changed <= 1000, "at most so many elements change"


@pytest.mark.parametrize(("dtype", "bits"), [("F4", 4), ("F6_E2M3", 6)])
def test_elements_of_less_than_a_byte_are_counted(dtype: str, bits: int) -> None:
    random = np.random.default_rng(0)
    n = 2**22  # more than one slice
    before = random.integers(0, 256, n * bits // 8, dtype=np.uint8)
    elements = np.unpackbits(before, bitorder="little").reshape(n, bits)
    chosen = random.permutation(n)[: n // 3]
    elements[chosen, chosen % bits] ^= 1
    after = np.packbits(elements, bitorder="little")
    assert np.count_nonzero(before != after) != n // 3
    old, new = ({"x": View("x", dtype, (n,), values)} for values in (before, after))
    assert make_update(old, new, Update(1, 0), 1).changed == n // 3


def test_a_few_changes_take_few_bytes() -> None:
    old, new = state_of(0, 300_000), state_of(1, 300_000)
    changed = int((old["weight"] != new["weight"]).sum())
    assert len(diff(old, new)) < 2 * changed + 1500


@pytest.mark.parametrize("layout", ["transposed", "strided", "offset", "column", "flipped"])
def test_what_lies_between_the_values_stays(layout: str) -> None:
    """Whatever the tensor's layout, its own memory is written and no other."""
    room = draw_bits(torch.bfloat16, (64, 9, 3), 1)
    wanted = room.clone()

    def view_of(whole: torch.Tensor) -> Any:
        if layout == "flipped":  # strides below 0, which only NumPy has
            return whole.view(torch.int16).numpy()[::-2, ::-1, 1]
        views = {
            "transposed": whole.permute(2, 0, 1),
            "strided": whole[::3, :, 1],
            "offset": whole.view(-1)[5:900],
            "column": whole[:, 4, 2],
        }
        return views[layout]

    view, result = view_of(room), view_of(wanted)
    old = {"x": view.copy() if layout == "flipped" else view.clone()}
    result += 1 if layout == "flipped" else 0
    if layout != "flipped":
        result.copy_(draw_bits(torch.bfloat16, tuple(result.shape), 2))
    patch({"x": view}, diff(old, {"x": result}))
    assert bits(room) == bits(wanted)


def test_a_mapped_file_is_patched(tmp_path: Path) -> None:
    """Its tensors are views of the file, at places that no element is aligned to."""
    old, new = state_of(0), state_of(1)
    path = tmp_path / "model.safetensors"
    safetensors.torch.save_file(old, path)
    mapped = np.memmap(path, np.uint8, "r+")
    head = 8 + int.from_bytes(mapped[:8].tobytes(), "little")
    header = json.loads(mapped[8:head].tobytes())
    views = {}
    for name, values in old.items():
        begin, end = header[name]["data_offsets"]
        mapping = torch.from_numpy(mapped[head + begin : head + end])
        views[name] = mapping.view(values.dtype).view(values.shape)
    patch(views, diff(old, new))
    mapped.flush()
    assert_same(safetensors.torch.load_file(path), new)


def test_tied_tensors_travel_once() -> None:
    old = state_of(0)
    new = state_of(1)
    alone = len(diff(old, new))
    old["head"], new["head"] = old["weight"], new["weight"]
    delta = diff(old, new)
    assert len(delta) < alone + 400
    apart = {name: values.clone() for name, values in old.items()}
    patch(old, delta)
    assert_same(old, new)
    assert old["head"] is old["weight"]
    patch(apart, delta)  # where they are not one memory, both are written
    assert_same(apart, new)


def test_a_model_is_patched_in_place() -> None:
    model = torch.nn.Linear(30, 20).bfloat16()
    later = torch.nn.Linear(30, 20).bfloat16()
    weight = model.weight
    patch(model, diff(model, later))
    assert_same(model.state_dict(), later.state_dict())
    assert model.weight is weight


def test_a_compiled_module_has_the_names_of_its_module() -> None:
    model, later = torch.nn.Linear(3, 2), torch.nn.Linear(3, 2)
    patch(model, diff(model, torch.compile(later)))
    assert_same(model.state_dict(), later.state_dict())


def test_a_model_without_the_tensors_is_refused_before_it_changes() -> None:
    model, kept = torch.nn.Linear(3, 2), torch.nn.Linear(3, 2).state_dict()
    model.load_state_dict(kept)
    new = {"weight": torch.ones(2, 3), "scale": torch.ones(2), "bias": torch.ones(2)}
    with pytest.raises(WeightsError, match=r"'scale' of the delta is F32 \[2\], the model lacks"):
        patch(model, diff(kept, new))
    with pytest.raises(WeightsError, match=r"'bias' of the delta is F32 \[3\], the model has F32"):
        patch(model, diff(kept, {"weight": kept["weight"], "bias": torch.ones(3)}))
    assert_same(model.state_dict(), kept)


def test_another_base_is_refused_before_it_changes() -> None:
    delta = diff(state_of(0), state_of(1))
    for place in range(3000):
        if place % 300:
            continue
        other = state_of(0)
        other["weight"].view(-1)[place] += 1
        kept = {name: values.clone() for name, values in other.items()}
        with pytest.raises(StaleBaseError, match=r"'weight' is not the one that the delta"):
            patch(other, delta)
        assert_same(other, kept)


def test_who_patches_twice_is_told_so() -> None:
    old, new = state_of(0), state_of(1)
    delta = diff(old, new)
    patch(old, delta)
    for use in (lambda: patch(old, delta), lambda: list(changes(old, delta))):
        with pytest.raises(StaleBaseError) as refused:
            use()
        said = "others. Nothing was changed; perhaps the delta was applied already"
        assert str(refused.value).endswith(said)
        assert "version" not in str(refused.value)
    assert_same(old, new)


def test_a_model_that_lacks_the_base_is_told_so() -> None:
    delta = diff({"weight": torch.zeros(5), "bias": torch.zeros(5)}, {"weight": torch.ones(5)})
    with pytest.raises(StaleBaseError, match=r"was made for: the model lacks it\. Nothing"):
        patch(torch.nn.ParameterDict({"bias": torch.zeros(5)}), delta)


def test_an_unchanged_tensor_with_other_values_is_refused() -> None:
    old = {"frozen": torch.ones(5), "weight": torch.zeros(5)}
    delta = diff(old, {"frozen": torch.ones(5), "weight": torch.ones(5)})
    old["frozen"][2] = 3
    with pytest.raises(StaleBaseError, match="'frozen'"):
        patch(old, delta)


def test_any_changed_or_missing_byte_is_found() -> None:
    """Or it is one that means nothing: the tensors are the new ones, or those of before."""
    old, new = state_of(0), state_of(1)
    delta = diff(old, new)
    random = np.random.default_rng(0)
    refused = 0
    for at in random.integers(0, len(delta), 300):
        damaged = bytearray(delta)
        damaged[at] ^= 1 << int(random.integers(8))
        for data in (bytes(damaged), delta[:at]):
            target = state_of(0)
            try:
                patch(target, data)
            except (WeightsError, DamagedVersionError):
                assert_same(target, old)
                refused += 1
            else:
                wanted = {name: new[name] for name in new if name in target}
                assert_same({name: target[name] for name in wanted}, wanted)
    assert refused > 550


def test_a_model_of_many_tensors_of_which_few_change_has_versions() -> None:
    """A header that names 36,000 experts was too long for a file with little else."""
    old = {f"{'x' * 10_000}{i}": np.zeros(1, np.float32) for i in range(500)}
    new = old | {"y": np.ones(1, np.float32)}
    delta = diff(old, new)
    assert len(delta) > 2**22
    store, target = MemoryFolder(), dict(old)
    patch(target, delta)
    assert target.keys() == new.keys()
    publisher, target = Publisher(store, base=old), dict(old)
    subscriber = Subscriber(store, version=0)
    for state in (old, new):
        publisher.publish(state)
        subscriber.fetch()
        subscriber.apply_(target)
        assert target.keys() == state.keys()


@pytest.mark.parametrize(
    ("state", "message"),
    [
        ({"x": [1, 2]}, r"'x' is of type list; only arrays and tensors"),
        ({"x": {"y": np.ones(2)}}, r"'x' is of type dict; .*; flatten\(\) makes tensors"),
        ({"x": np.array(["a"])}, r"tensor 'x': dtype <U1 is not supported"),
        ({"x": np.ones(2, ">i8")}, r"tensor 'x' has big-endian values; astype\('<i8'\) turns them"),
        (
            {"x": torch.ones(2, device="meta")},
            r"no plain values: it is torch.float32, torch.strided, on meta",
        ),
        (3, r"int is neither a dictionary"),
    ],
)
def test_what_is_no_tensor_is_named(state: Any, message: str) -> None:
    with pytest.raises(WeightsError, match=message):
        diff({}, state)


def test_a_file_without_deltas_is_refused() -> None:
    with pytest.raises(DamagedVersionError, match=r"without deltas; `gradwire delta`"):
        patch({}, safetensors.torch.save({"x": torch.ones(3)}))


def test_it_needs_no_pytorch() -> None:
    program = (
        "import sys; import numpy as np; from gradwire.weights import diff, patch\n"
        "assert 'torch' not in sys.modules; sys.modules['torch'] = None\n"
        "x = {'x': np.ones(4)}; patch(x, diff(x, {'x': np.zeros(4)})); assert not x['x'].any()\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


WRONG: Any = [None, "x", "3", 2.5]
MISTAKEN: dict[str, Callable[[Path], object]] = {
    "delta is 'x'; a bytes": lambda _: patch({}, WRONG[1]),
    "delta is None; a bytes": lambda _: changes({}, WRONG[0]),
    "threads is '3'; a whole number": lambda _: diff({}, {}, threads=WRONG[2]),
    "keep is '3'; a whole number": lambda store: prune(store, keep=WRONG[2]),
    "keep is 2.5; a whole number": lambda store: prune(store, keep=WRONG[3]),
    "first is None; a whole number": lambda store: fold(store, WRONG[0], 3),
    "version is '3'; a whole number": lambda store: Subscriber(store).fetch(WRONG[2]),
    "anchor is 'x'; True or False": lambda store: Publisher(store).publish({}, anchor=WRONG[1]),
    "tensors is None; a Mapping": lambda _: unflatten(WRONG[0]),
}


@pytest.mark.parametrize("said", MISTAKEN)
def test_arguments_of_another_type_are_refused_by_name(tmp_path: Path, said: str) -> None:
    with pytest.raises(TypeError, match=f"^{said}.* is needed$"):
        MISTAKEN[said](tmp_path)
    assert not list(tmp_path.iterdir())
