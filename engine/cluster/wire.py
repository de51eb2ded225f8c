"""Messages between a driver and its workers: a header in msgpack, then raw bytes, over connections of Dask.

    | "ggj1" | header nbytes u32 | payload nbytes u32 | header: msgpack | payload |

Connections, listeners and TLS are those of `distributed.comm`.  Its own messages may carry pickles, which run code when
they are read; so messages are framed here, and nothing that comes from the wire is ever unpickled.  Every length is
checked against a bound before memory is taken for it.

    inproc://               both ends in one process, for tests
    tcp://127.0.0.1:8790    loopback only
    tls://10.0.0.2:8790     anywhere; both sides show certificates (engine/cluster/certificates.py)
"""
import asyncio
import ipaddress
import struct

from ggjit.ops.core.errors import GgjitError, ParamError, extra

msgpack = extra("msgpack", "cluster")
comm_core = extra("distributed.comm.core", "cluster")
comm_tcp = extra("distributed.comm.tcp", "cluster")
comm_inproc = extra("distributed.comm.inproc", "cluster")

MAGIC = b"ggj1"
PREFIX = struct.Struct("<4sII")         # magic, header nbytes, payload nbytes
MAX_HEADER_NBYTES = 2 << 20
MAX_PAYLOAD_NBYTES = 32 << 20
MAX_ITEMS = 1 << 16                     # of one list of a header
SMALL_NBYTES = 1 << 16                  # a payload below it is sent and read in one piece with its header
SCHEMES = ("inproc", "tcp", "tls")


class BadMessage(GgjitError, ValueError):
    """Bytes from the wire that are no message."""


# ---------------------------------------------------------------- addresses
def checked_address(address, tls):
    """(scheme, location) of an address.  Errors: ParamError; off loopback for anything but TLS with certificates."""
    scheme, sep, location = address.partition("://") if isinstance(address, str) else ("", "", "")
    if not sep or scheme not in SCHEMES:
        raise ParamError(f"address {address!r}: expected tcp://HOST:PORT, tls://HOST:PORT or inproc://")
    if scheme == "inproc":
        return scheme, location
    host, _, port = location.rpartition(":")
    if not host or not port.isdigit() or int(port) > 65535:
        raise ParamError(f"address {address!r}: expected {scheme}://HOST:PORT, such as {scheme}://127.0.0.1:8790")
    if scheme == "tls" and tls is None:
        raise ParamError(f"{address}: TLS needs certificates: make them with `ggjit worker --make-certs DIR`, give "
                         f"them to every machine, and pass tls=\"DIR\" (--tls DIR)")
    if scheme == "tcp" and not is_loopback(host):
        raise ParamError(f"{address} is not on this machine: off loopback a connection is encrypted and both sides "
                         f"show certificates; use tls://{location} with tls=\"DIR\" (`ggjit worker --make-certs DIR`)")
    return scheme, location


def is_loopback(host):
    """Is it an address that only this machine reaches?"""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


# ---------------------------------------------------------------- connections
class _Silent:
    """Mixin for Dask's listeners: no handshake of theirs, whose messages may carry pickles."""

    async def on_connection(self, comm, handshake_overrides=None):
        """The hello of engine/cluster/protocol.py comes first."""


class _TCPListener(_Silent, comm_tcp.TCPListener):
    pass


class _TLSListener(_Silent, comm_tcp.TLSListener):
    pass


class _InProcListener(_Silent, comm_inproc.InProcListener):
    pass


async def listen(address, handler, tls=None):
    """A started listener that calls the coroutine function `handler` with every new connection."""
    scheme, location = checked_address(address, tls)
    if scheme == "inproc":
        listener = _InProcListener(location, handler, deserialize=False)
    elif scheme == "tcp":
        listener = _TCPListener(location, handler, deserialize=False)
    else:
        listener = _TLSListener(location, handler, deserialize=False, ssl_context=tls.listener_context)
    await listener.start()
    return listener


async def connect(address, tls=None):
    """A connection; the caller limits the time.  Errors: OSError."""
    scheme, location = checked_address(address, tls)
    if scheme == "inproc":
        return await comm_inproc.InProcConnector(comm_inproc.global_manager).connect(location, deserialize=False)
    if scheme == "tcp":
        return await comm_tcp.TCPConnector().connect(location, deserialize=False)
    return await comm_tcp.TLSConnector().connect(location, deserialize=False, ssl_context=tls.connector_context)


# ---------------------------------------------------------------- messages
def pack(header):
    """The bytes of a header."""
    return msgpack.packb(header, use_bin_type=True)


def unpack(raw):
    """The header in `raw`: lists, dicts, integers, floats, strings, bytes.  Errors: BadMessage."""
    try:
        return msgpack.unpackb(raw, raw=False, max_array_len=MAX_ITEMS, max_map_len=64, max_str_len=1 << 16,
                               max_bin_len=1 << 10, max_ext_len=0)
    except (ValueError, TypeError, RecursionError, msgpack.UnpackException) as e:
        raise BadMessage(f"a message whose header cannot be read: {e}") from None


def write(comm, header, parts=()):
    """Send a message, its header packed.  Returns a future, done when the bytes are out of Python's hands.

    parts: bytes-like objects; they must stay as they are until then.  Errors: OSError if the connection is closed.
    """
    nbytes = sum(len(p) for p in parts)
    prefix = PREFIX.pack(MAGIC, len(header), nbytes)
    if isinstance(comm, comm_inproc.InProc):
        done = asyncio.ensure_future(comm.write((prefix, bytes(header), [*parts])))
        done.add_done_callback(lambda task: task.cancelled() or task.exception())      # the reader will notice
        return done
    stream = comm.stream
    if stream is None or stream.closed():
        raise comm_core.CommClosedError("the connection is closed")
    if nbytes < SMALL_NBYTES:
        return stream.write(b"".join((prefix, header, *parts)))
    done = stream.write(prefix + header)
    for part in parts:
        done = stream.write(part)
    return done


def own_socket(comm):
    """The socket of a connection under a number of its own, which nobody else closes; None where it is no bare one."""
    if not isinstance(comm, comm_tcp.TCP) or isinstance(comm, comm_tcp.TLS):
        return None
    stream = comm.stream
    return None if stream is None or stream.closed() else stream.socket.dup()


def write_now(own, comm, header, parts=()):
    """As much of a small message as the socket takes at once, from any thread; returns the bytes that are left over,
    which have to follow before anything else, or None: it was not begun.  Nothing else may be on its way out."""
    if own is None or sum(map(len, parts)) >= SMALL_NBYTES:
        return None
    stream = comm.stream
    if stream is None or stream.closed() or stream.writing():
        return None
    message = b"".join((PREFIX.pack(MAGIC, len(header), sum(map(len, parts))), header, *parts))
    try:
        return message[own.send(message):]
    except OSError:                                     # it is full, or closed: the loop will notice
        return message


async def read(comm, sink=None, limit_nbytes=MAX_PAYLOAD_NBYTES):
    """(header, payload) of the next message.

    sink(header, nbytes): a writable memoryview of nbytes bytes to read the payload into, or None: a new bytearray.
    limit_nbytes: of the payload.
    Errors: OSError (the connection ended), BadMessage.
    """
    if isinstance(comm, comm_inproc.InProc):
        prefix, header, parts = await comm.read()
        n_header, n_payload = _sizes(prefix, limit_nbytes)
        header = unpack(header)
        target = _target(sink, header, n_payload)
        at = 0
        for part in parts:
            target[at:at + len(part)] = part
            at += len(part)
        return header, target
    stream = comm.stream
    if stream is None:
        raise comm_core.CommClosedError("the connection is closed")
    n_header, n_payload = _sizes(await stream.read_bytes(PREFIX.size), limit_nbytes)
    small = n_payload if n_payload < SMALL_NBYTES else 0           # read with the header: each wait takes its time
    body = await stream.read_bytes(n_header + small)
    header = unpack(memoryview(body)[:n_header])
    target = _target(sink, header, n_payload)
    if small:
        target[:] = memoryview(body)[n_header:]
    elif n_payload:
        await stream.read_into(target)
    return header, target


def _sizes(prefix, limit_nbytes):
    magic, n_header, n_payload = PREFIX.unpack(prefix)
    if magic != MAGIC:
        raise BadMessage(f"the other side does not speak ggjit's protocol (its message begins with {magic!r})")
    if not 0 < n_header <= MAX_HEADER_NBYTES or n_payload > limit_nbytes:
        raise BadMessage(f"a message of {n_header:,} + {n_payload:,} bytes; at most {MAX_HEADER_NBYTES:,} and "
                         f"{limit_nbytes:,} are taken")
    return n_header, n_payload


def _target(sink, header, nbytes):
    target = None if sink is None else sink(header, nbytes)
    return bytearray(nbytes) if target is None else target

