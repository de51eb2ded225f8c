"""Messages between a driver and its workers: a header in msgpack, then raw bytes, over sockets.

    | "ggj1" | header nbytes u32 | payload nbytes u32 | header: msgpack | payload |

A message is read and written by the thread that needs it, without an event loop: a step of 8 KB each way takes half of
the time it does over `distributed.comm`, and large pieces go between the socket and the memory they belong to.
Nothing that comes from the wire is ever unpickled, and every length is checked against a bound before memory is taken.

    inproc://               both ends in one process, for tests
    tcp://127.0.0.1:8790    loopback only
    tls://10.0.0.2:8790     anywhere; both sides show certificates (engine/cluster/certificates.py)
"""
import collections
import contextlib
import functools
import ipaddress
import itertools
import select
import selectors
import socket
import ssl
import struct
import sys
import threading
import time

from ggjit.ops.core.errors import GgjitError, ParamError, extra

msgpack = extra("msgpack", "cluster")

MAGIC = b"ggj1"
PREFIX = struct.Struct("<4sII")         # magic, header nbytes, payload nbytes
MAX_HEADER_NBYTES = 2 << 20
MAX_PAYLOAD_NBYTES = 32 << 20
MAX_ITEMS = 1 << 16                     # longest list in a header
SMALL_NBYTES = 1 << 16                  # a payload below it is sent and read in one piece with its header
READ_NBYTES = 1 << 15                   # read at once while it is not known where bytes belong
MAX_CONNECTIONS = 256                   # connections that a listener serves at once
MAX_HANDSHAKES = 64                     # handshakes under way at once; one more ends the oldest
HANDSHAKE_SECONDS = 10.0
SILENT_SECONDS = 20                     # a connection whose other machine acknowledges nothing for so long has ended
SCHEMES = ("inproc", "tcp", "tls")


class BadMessage(GgjitError, ValueError):
    """Bytes from a connection that are no valid message."""


# ---------------------------------------------------------------- addresses
def checked_address(address, tls):
    """(scheme, location) of an address.  Errors: ParamError; off loopback for anything but TLS with certificates."""
    scheme, sep, location = address.partition("://") if isinstance(address, str) else ("", "", "")
    if not sep or scheme not in SCHEMES:
        raise ParamError(f"address {address!r}: expected tcp://HOST:PORT, tls://HOST:PORT or inproc://")
    if scheme == "inproc":
        return scheme, location
    host, _, port = location.rpartition(":")
    if not (_is_host(host) and port.isascii() and port.isdigit() and len(port) < 6 and int(port) <= 65535):
        raise ParamError(f"address {address!r}: expected {scheme}://HOST:PORT, such as {scheme}://127.0.0.1:8790")
    if scheme == "tls" and tls is None:
        raise ParamError(f"{address}: TLS needs certificates: make them with `ggjit worker --make-certs DIR`, give "
                         f"them to every machine, and pass tls=\"DIR\" (--tls DIR)")
    if scheme == "tcp" and not is_loopback(host):
        raise ParamError(f"{address} is not on this machine: off loopback a connection is encrypted and both sides "
                         f"show certificates; use tls://{location} with tls=\"DIR\" (`ggjit worker --make-certs DIR`)")
    return scheme, location


def _is_host(host):
    """Can the text be the name or address of a host?"""
    try:
        return bool(host.encode("idna")) and "\0" not in host
    except UnicodeError:                        # a part of it is empty or too long
        return False


def is_loopback(host):
    """Is it an address that only this machine reaches?"""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def _host_and_port(location):
    host, _, port = location.rpartition(":")
    return host.strip("[]"), int(port)


# ---------------------------------------------------------------- connections
class Connection:
    """One end of a connection: whole messages, in order.  One thread reads at a time, and one writes."""

    def __init__(self, sock):
        self.sock = sock
        self._one = contextlib.nullcontext()    # a TLS connection is used by one thread at a time
        self._held = memoryview(bytearray(2 * SMALL_NBYTES))
        self._start = self._end = 0             # bytes of the buffer that are not consumed yet: start and end
        self._large = None                      # (header, payload, bytes of it that are there) of a message under way
        self.n_received = 0                     # bytes
        self.admit = lambda: None               # called once the other side has greeted; OSError: there is no room

    def do_not_block(self):
        """From now on `read` returns None where it would wait."""
        self.sock.settimeout(0)
        if isinstance(self.sock, ssl.SSLSocket):
            self._one = threading.Lock()

    def wait(self, seconds, writing=False):
        """Wait until there is something to read (or room to write), the connection ends, or the time is over."""
        fd = self.sock.fileno()
        if fd < 0:
            raise ConnectionError("the connection was closed here")
        if hasattr(select, "poll"):
            poll = select.poll()
            poll.register(fd, select.POLLIN | select.POLLOUT if writing else select.POLLIN)
            poll.poll(1e3 * seconds)
        else:
            select.select([fd], [fd] if writing else [], [], seconds)

    def write(self, header, parts=(), blocked=None):
        """Send a message, its header packed; parts: bytes-like objects.

        blocked: called again and again while a connection that does not block takes nothing.  Errors: OSError.
        """
        nbytes = sum(map(len, parts))
        prefix = PREFIX.pack(MAGIC, len(header), nbytes)
        for piece in [b"".join((prefix, header, *parts))] if nbytes < SMALL_NBYTES else [prefix + header, *parts]:
            self._send(piece, blocked)

    def _send(self, piece, blocked):
        left = memoryview(piece)
        while len(left):
            try:
                with self._one:
                    n = self.sock.send(left)
            except (BlockingIOError, ssl.SSLWantWriteError, ssl.SSLWantReadError):
                blocked()
                continue
            left = left[n:]

    def read(self, sink=None, limit_nbytes=MAX_PAYLOAD_NBYTES, seconds=None, moved=None):
        """(header, payload) of the next message; None if it is not all there and the connection does not block.

        sink(header, nbytes): a writable memoryview of nbytes bytes to read the payload into, or None: a new bytearray.
        limit_nbytes: of the payload.  seconds: for all of the message, then TimeoutError.  moved: called after each
        piece of a large one.  Errors: OSError (the connection ended), BadMessage.
        """
        deadline = None if seconds is None else time.monotonic() + seconds
        while True:
            if deadline is not None:
                self.sock.settimeout(max(deadline - time.monotonic(), 1e-3))
            if self._large is None:
                found = self._taken(sink, limit_nbytes)
                if found is not None:
                    return found
            if self._large is None:
                n = self._receive(self._held[self._end:self._end + READ_NBYTES])
                if n is None:
                    return None
                self._end += n
            else:
                header, payload, at = self._large
                n = self._receive(memoryview(payload)[at:])
                if n is None:
                    return None
                self._large = header, payload, at + n
                if moved is not None:
                    moved()
                if at + n == len(payload):
                    self._large = None
                    return header, payload

    def _receive(self, where):
        try:
            with self._one:
                n = self.sock.recv_into(where)
        except (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError):
            return None
        if not n:
            raise ConnectionError("the other side has closed the connection")
        self.n_received += n
        return n

    def _taken(self, sink, limit_nbytes):
        """The next message, if it is all here.  Else what is here of a large one becomes `_large`, and for any other
        one there is room."""
        have, need = self._end - self._start, PREFIX.size
        if have >= need:
            at = self._start + need
            n_header, n_payload = _sizes(self._held[self._start:at], limit_nbytes)
            need += n_header + (n_payload if n_payload < SMALL_NBYTES else 0)
            if have >= need:
                header = unpack(self._held[at:at + n_header])
                at += n_header
                n = min(n_payload, self._end - at)
                payload = None if sink is None else sink(header, n_payload)
                payload = bytearray(n_payload) if payload is None else payload
                payload[:n] = self._held[at:at + n]
                self._start = at + n
                if n == n_payload:
                    return header, payload
                self._large, have, need = (header, payload, n), 0, 0
        if not have:
            self._start = self._end = 0
        elif self._start + need > len(self._held):
            rest = bytes(self._held[self._start:self._end])
            if need > len(self._held):
                self._held = memoryview(bytearray(need))
            self._held[:have], self._start, self._end = rest, 0, have
        return None

    def is_silent(self):
        """Has the other machine acknowledged nothing for SILENT_SECONDS, though data or probes were sent?  A program
        there that reads nothing is not silent: its system acknowledges for it."""
        if self.sock.family == getattr(socket, "AF_UNIX", None) or not sys.platform.startswith("linux"):
            return False
        info = self.sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 60)    # struct tcp_info of linux/tcp.h
        n_retransmits, n_probes, last_ack_ms = struct.unpack_from("=2x2B52xI", info)
        return n_retransmits + n_probes >= 3 and last_ack_ms > 1000 * SILENT_SECONDS

    def end(self):
        """End the connection for both sides; from any thread, also while another one reads or writes."""
        with contextlib.suppress(OSError):      # the connection has ended
            socket.socket.shutdown(self.sock, socket.SHUT_RDWR)

    def close(self):
        """Close the socket; called by the thread that used it last."""
        self.end()
        self.sock.close()


def _sizes(prefix, limit_nbytes):
    magic, n_header, n_payload = PREFIX.unpack(prefix)
    if magic != MAGIC:
        raise BadMessage(f"the other side does not speak ggjit's protocol (its message begins with {magic!r})")
    if not 0 < n_header <= MAX_HEADER_NBYTES or n_payload > limit_nbytes:
        raise BadMessage(f"a message of {n_header:,} + {n_payload:,} bytes; at most {MAX_HEADER_NBYTES:,} and "
                         f"{limit_nbytes:,} are taken")
    return n_header, n_payload


def _tuned(sock, seconds):
    """Set socket options: small messages are sent at once, and a peer that vanished is noticed."""
    sock.settimeout(seconds)
    options = {"TCP_NODELAY": 1, "TCP_KEEPIDLE": SILENT_SECONDS // 2, "TCP_KEEPINTVL": SILENT_SECONDS // 4,
               "TCP_KEEPCNT": 2}
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in options.items():
        if hasattr(socket, name):               # not every system has all of them
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
    return sock


def connect(address, tls=None, seconds=HANDSHAKE_SECONDS):
    """A Connection, whose waits end after so many seconds each.  Errors: ParamError, OSError (TimeoutError)."""
    scheme, location = checked_address(address, tls)
    if scheme == "inproc":
        listener = _inproc.get(location)
        if listener is None:
            raise ConnectionRefusedError("no worker listens there")
        sock, theirs = socket.socketpair()
        sock.settimeout(seconds)
        listener.take(theirs)
        return Connection(sock)
    sock = socket.create_connection(_host_and_port(location), seconds)
    try:
        _tuned(sock, seconds)
        return Connection(tls.connector_context.wrap_socket(sock) if scheme == "tls" else sock)
    except BaseException:
        sock.close()
        raise


_inproc, _numbers = {}, itertools.count(1)      # {location: Listener} of this process


class Listener:
    """Calls `handler` with every new connection, in a thread of its own.  `address`: with the port that was chosen.

    Errors: ParamError (also for certificates that cannot be used), OSError (the address is taken).
    """

    def __init__(self, address, handler, tls=None):
        scheme, location = checked_address(address, tls)
        self._handler, self._admitted = handler, set()
        self._tls_context = tls.listener_context if scheme == "tls" else None
        self._handshakes = collections.deque()  # connections that have not greeted yet, the oldest first
        # of _handshakes and _admitted; a connection there is open while it is held
        self._lock = threading.Lock()
        self._scheme, self.sock = scheme, None
        if scheme == "inproc":
            self._location = location or str(next(_numbers))
            self.address = f"inproc://{self._location}"
            if _inproc.setdefault(self._location, self) is not self:
                raise OSError(f"{self.address} is in use")
            return
        host, port = _host_and_port(location)
        family, _, _, _, at = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        self.sock = socket.create_server(at, family=family, backlog=128)
        host, port = self.sock.getsockname()[:2]
        self.address = f"{scheme}://{f'[{host}]' if ':' in host else host}:{port}"
        self._stopped, self._stop = socket.socketpair()
        threading.Thread(target=self._accept, daemon=True, name="ggjit-listener").start()

    def _accept(self):
        with self.sock, self._stopped, selectors.DefaultSelector() as ready:
            for sock in (self.sock, self._stopped):
                ready.register(sock, selectors.EVENT_READ)
            while all(key.fileobj is self.sock for key, _ in ready.select()):
                try:
                    sock = self.sock.accept()[0]
                except OSError:                 # who wanted to connect has left, or there are too many open files
                    time.sleep(0.01)
                else:
                    self.take(sock)

    def take(self, sock):
        """Serve a new connection in a thread of its own; where the system has no more threads, it ends."""
        conn = None
        try:
            if self._scheme != "inproc":
                _tuned(sock, HANDSHAKE_SECONDS)
            if self._scheme == "tls":
                sock = self._tls_context.wrap_socket(sock, server_side=True, do_handshake_on_connect=False)
            conn = Connection(sock)
            conn.admit = functools.partial(self._admit, conn)
            self._begin_handshake(conn)
            threading.Thread(target=self._serve, args=(conn,), daemon=True, name="ggjit-session").start()
        except (OSError, RuntimeError):         # the other side has left already; no more threads
            self._end_handshake(conn)
            sock.close()

    def _serve(self, conn):
        try:
            if self._scheme == "tls":
                conn.sock.do_handshake()
            self._handler(conn)
        except OSError:                         # no certificate, or no TLS
            return
        finally:
            self._end_handshake(conn)
            with self._lock:
                self._admitted.discard(conn)
            conn.sock.close()

    def _begin_handshake(self, conn):
        """Connections that have not greeted, or have no certificate, take no room of others: of too many the oldest
        ends."""
        with self._lock:
            self._handshakes.append(conn)
            if len(self._handshakes) > MAX_HANDSHAKES:
                self._handshakes.popleft().end()

    def _admit(self, conn):
        """Count a connection that has greeted as one of the MAX_CONNECTIONS.  Errors: ConnectionError where there is
        no room."""
        self._end_handshake(conn)
        with self._lock:
            if len(self._admitted) >= MAX_CONNECTIONS:
                raise ConnectionError(f"{MAX_CONNECTIONS} connections are served already")
            self._admitted.add(conn)

    def _end_handshake(self, conn):
        with self._lock, contextlib.suppress(ValueError):       # it was the oldest one, or has ended before
            self._handshakes.remove(conn)

    def stop(self):
        """Take no new connections; a second call does nothing."""
        if self._scheme == "inproc":
            _inproc.pop(self._location, None)
        else:
            self._stop.close()              # wakes `_accept`


# ---------------------------------------------------------------- headers
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
