"""The event loop of this process on which connections live: one daemon thread, made when it is first needed."""
import asyncio
import os
import threading

from ggjit.ops.core.locks import ForkLock

_making = ForkLock()
_loop = None                    # (process id, loop)


def event_loop():
    """The running loop; a forked child gets one of its own."""
    global _loop
    with _making:
        if _loop is None or _loop[0] != os.getpid():
            loop = asyncio.new_event_loop()
            threading.Thread(target=_live, args=(loop,), daemon=True, name="ggjit-cluster").start()
            _loop = os.getpid(), loop
        return _loop[1]


def _live(loop):
    asyncio.set_event_loop(loop)
    loop.run_forever()


def run(coroutine, timeout=None):
    """The result of a coroutine on that loop.  Errors: its own; TimeoutError."""
    future = asyncio.run_coroutine_threadsafe(coroutine, event_loop())
    try:
        return future.result(timeout)
    except BaseException:
        future.cancel()
        raise
