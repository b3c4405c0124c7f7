"""Whether a process can still compute on its card.

Under MPS the end of one process may end what all others have on the card. One that computes gets an error. One that is
idle hears nothing of it, and keeps the card's daemon from letting anybody begin again.
"""

from __future__ import annotations

import logging
import os

import torch

logger = logging.getLogger(__name__)


def ask_device() -> None:
    """Raises torch.AcceleratorError, a RuntimeError, if this process can compute nothing more there.

    Waits for nothing. A process that has not used a card is told nothing.
    """
    if torch.cuda.is_initialized():
        torch.cuda.current_stream().query()


def end_without_device() -> None:
    """Ends this process, an engine's, if it can compute nothing more: whoever talks to it notices that at once."""
    try:
        ask_device()
    except RuntimeError as error:
        logger.critical("this engine ends: its device computes nothing more: %s", error)
        os._exit(1)
