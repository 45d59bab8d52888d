"""Operators as compiled kernels where there are any (docs/kernels.md); everything here has its like in pure torch."""

from trustregion.ops.library import describe, native, using

__all__ = ["describe", "native", "using"]
