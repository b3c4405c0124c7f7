"""Whether a process can still compute on its card.

Under MPS the end of one process may end what all others have on the card. One that computes gets an error. One that is
idle hears nothing of it, and keeps the card's daemon from letting anybody begin again.
"""

from __future__ import annotations

import logging
import os

import torch

logger = logging.getLogger(__name__)


class Device:
    """The card of this process, asked now and then. A process that has not used one does not begin to."""

    def __init__(self) -> None:
        self._asked: torch.cuda.Event | None = None

    def ask(self) -> None:
        """Raises torch.AcceleratorError, a RuntimeError, if the process can compute nothing more.

        Leaves an event on the card and waits for nothing: what became of it is asked the next time.
        """
        if not torch.cuda.is_initialized():
            return
        if self._asked is not None:
            self._asked.query()
        self._asked = self._asked or torch.cuda.Event()
        self._asked.record()

    def end_without(self) -> None:
        """Ends this process, an engine's, if it can compute nothing more: its peers notice that at once."""
        try:
            self.ask()
        except RuntimeError as error:
            logger.critical("this engine ends: its device computes nothing more: %s", error)
            os._exit(1)


DEVICE = Device()
