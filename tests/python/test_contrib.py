"""The adapters of frameworks say what they need where it is not installed."""

from __future__ import annotations

import importlib
import re
import sys

import pytest

pytest.importorskip("torch", reason="the adapters need PyTorch")


@pytest.mark.parametrize(
    ("adapter", "package", "source"),
    [
        ("accelerate", "accelerate", "'.[recipes]'"),
        ("flower", "flwr", "'.[flower]'"),
        ("lightning", "lightning", "'.[recipes]'"),
        ("nvflare", "nvflare", "'.[recipes]'"),
        ("ray", "ray", "'.[recipes]'"),
        ("torchft", "torchft", "'.[recipes]'"),
        ("transformers", "transformers", "'.[recipes]'"),
    ],
)
def test_a_missing_framework_is_named(
    adapter: str, package: str, source: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = f"gradwire.contrib.{adapter}"
    monkeypatch.setitem(sys.modules, package, None)
    monkeypatch.delitem(sys.modules, module, raising=False)
    with pytest.raises(ModuleNotFoundError, match=rf"{module} needs .*{re.escape(source)}"):
        importlib.import_module(module)
