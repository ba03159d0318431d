"""The benchmarks; `isobit` comes before torch, whose threads it tells how to wait."""

import isobit  # noqa: F401
