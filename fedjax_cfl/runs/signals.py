"""Stopping a run by SIGTERM or SIGINT, between two blocks of rounds."""

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Iterator


@contextlib.contextmanager
def catch_signals() -> Iterator[list[int]]:
    """Yields a list that the first SIGTERM or SIGINT is put into; a second one ends the
    process at once.

    A thread listens, because Python's own handlers have to wait until a compiled block
    of rounds returns. Only the main thread can be told of signals: elsewhere none is caught.
    """
    asked: list[int] = []
    if threading.current_thread() is not threading.main_thread():
        yield asked
        return
    listening, waking = os.pipe()
    os.set_blocking(waking, False)

    def listen():
        while number := os.read(listening, 1):
            if number[0] not in (signal.SIGINT, signal.SIGTERM):
                continue
            if asked:
                os._exit(128 + number[0])
            asked.append(number[0])
            print(
                "fedjax-cfl: stopping after this block of rounds; once more stops at once",
                file=sys.stderr,
            )

    before = {
        number: signal.signal(number, lambda *_: None) for number in (signal.SIGINT, signal.SIGTERM)
    }
    descriptor = signal.set_wakeup_fd(waking, warn_on_full_buffer=False)
    listener = threading.Thread(target=listen, daemon=True)
    listener.start()
    try:
        yield asked
    finally:
        signal.set_wakeup_fd(descriptor)
        for number, handler in before.items():
            signal.signal(number, handler)
        os.close(waking)
        listener.join()
        os.close(listening)
