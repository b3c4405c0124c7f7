"""What a model may compute in."""

from __future__ import annotations

from typing import Literal

Precision = Literal["float32", "tfloat32", "bfloat16", "float16"]
"""tfloat32: float32 tensors whose products round their inputs to 10 bits on a GPU; on a CPU the same as float32."""
LayerPrecision = Literal[Precision, "float8"]
"""float8: bfloat16, but products of the layers round their inputs to 3 bits (e4m3), each row by a scale of its own."""
