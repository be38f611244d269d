"""Ctrl-C, SIGTERM and SIGHUP while ranks run: asked for where it suits, and never in the middle of cleaning up.

SIGUSR1 is no interruption: ranks are told to stop in good order.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType, TracebackType

_NUMBERS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Interruption:
    """A context in which these signals do no more than to be counted; one that nobody asked about counts at its end.

    After a first one it stays so when the context ends: the command is ending, and a hand that stays on Ctrl-C must not
    interrupt that either. Signals that are ignored (nohup) stay so. In a thread other than the main one nothing
    changes.

    Raises `KeyboardInterrupt`: at the end, if there was a signal and no other error.
    """

    def __init__(self) -> None:
        self._times = 0
        self._is_to_stop = False
        self._before: dict[signal.Signals, object] = {}

    def check(self) -> None:
        """Returns if there was no signal. Raises `KeyboardInterrupt`: there was one."""
        if self._times:
            raise KeyboardInterrupt

    def takes_stop(self) -> bool:
        """Whether there was a SIGUSR1, which asks to stop in good order, since this was asked last."""
        is_to_stop, self._is_to_stop = self._is_to_stop, False
        return is_to_stop

    def is_repeated(self) -> bool:
        """Whether somebody is impatient: there was more than one signal."""
        return self._times > 1

    def _stop(self, number: int, frame: FrameType | None) -> None:
        self._is_to_stop = True

    def _count(self, number: int, frame: FrameType | None) -> None:
        self._times += 1

    def __enter__(self) -> Interruption:
        if threading.current_thread() is threading.main_thread():
            for number in _NUMBERS:
                if signal.getsignal(number) is not signal.SIG_IGN:
                    self._before[number] = signal.signal(number, self._count)
            self._before[signal.SIGUSR1] = signal.signal(signal.SIGUSR1, self._stop)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self.check()
        if not self._times:
            for number, handler in self._before.items():
                signal.signal(number, handler)  # type: ignore[arg-type]  # what signal.signal gave


@contextmanager
def interrupted_by_signals() -> Iterator[None]:
    """A cancelled job or a closed terminal ends what runs as Ctrl-C does; nohup asks for the contrary."""

    def interrupt(number: int, frame: object) -> None:
        raise KeyboardInterrupt

    numbers = (signal.SIGTERM, signal.SIGHUP)
    before = {number: handler for number in numbers if (handler := signal.getsignal(number)) is not signal.SIG_IGN}
    for number in before:
        signal.signal(number, interrupt)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
