"""How values come from the device to the host."""

from __future__ import annotations

import numpy as np
import torch


def values_of(tensor: torch.Tensor) -> np.ndarray:
    """The tensor's values, of its shape and dtype, once they are computed; the thread sleeps until then.

    A copy alone waits too, but turns round: a core of a stage whose device is always at work.
    """
    if tensor.is_cuda:
        computed = torch.cuda.Event(blocking=True)
        computed.record(torch.cuda.current_stream(tensor.device))
        computed.synchronize()
    return tensor.cpu().numpy()
