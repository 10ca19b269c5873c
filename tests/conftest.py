"""What all Python tests share."""

from __future__ import annotations

import os

# pytest-xdist sets it, and commands would make their tables as wide.
os.environ.pop("COLUMNS", None)
