"""Events: points in a stream's work that others can wait for (ggml_backend_event).

    e = event_new(device)         None where the device has no events
    event_record(e, backend)      the point: after everything submitted to `backend` so far
    event_wait(backend, e)        later work of `backend` starts after the point; does not block the caller
    event_synchronize(e)          blocks the caller until the point is reached
    event_free(e)
"""
from ggjit.core.lifetime import Handle
from ggjit.ops.core.errors import ParamError


class Event(Handle):
    """A handle: the device's own event and the device that understands it."""

    def __init__(self, device, handle):
        self.device, self.handle = device, handle
        self.alive = True

    def __repr__(self):
        return f"<Event of {self.device.name}>"


def event_new(device):
    """An event of `device`, or None where it has none.

        e = gg.event_new(cpu.device)

    Source: ggml_backend_event_new.
    """
    handle = device.event_new()
    return None if handle is None else Event(device, handle)


def event_free(event):
    """Give the event back; None and a second call do nothing.

        gg.event_free(gg.event_new(cpu.device))

    Source: ggml_backend_event_free.
    """
    if event is not None and event.alive:
        event.alive = False
        event.device.event_free(event.handle)


def event_record(event, backend):
    """Set the point after everything submitted to `backend` so far.

        if e := gg.event_new(cpu.device):
            gg.event_record(e, cpu)

    Errors: ParamError (no event, a freed one, a backend of another device).  Source: ggml_backend_event_record.
    """
    _check(event)
    if backend.device is not event.device:
        raise ParamError(f"{event!r} cannot be recorded on {backend!r}, a backend of {backend.device.name}")
    backend.event_record(event.handle)


def event_wait(backend, event):
    """Later work of `backend` waits for the event; the backend may be of another device.

        if e := gg.event_new(cpu.device):
            gg.event_wait(cpu, e)

    A stream understands the events of devices of its own kind; for those of others the caller waits.
    Errors: ParamError (no event, a freed one).  Source: ggml_backend_event_wait.
    """
    _check(event)
    if type(backend.device) is type(event.device):
        backend.event_wait(event.handle)
    else:
        event_synchronize(event)


def event_synchronize(event):
    """Block until the event was reached.

        if e := gg.event_new(cpu.device):
            gg.event_synchronize(e)

    Errors: ParamError (no event, a freed one).  Source: ggml_backend_event_synchronize.
    """
    _check(event)
    event.device.event_synchronize(event.handle)


def _check(event):
    if not isinstance(event, Event):
        raise ParamError(f"expected an event (event_new), got {event!r}")
    if not event.alive:
        raise ParamError(f"{event!r} was freed")
