"""Types of the public names of ggjit.cluster."""
import os
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any

from ggjit import Device
from ggjit.models import embed_texts as embed
from ggjit.models import generate_texts as generate

__all__ = ["Cluster", "RemoteDevice", "connect", "embed", "generate", "local", "make_certificates", "serve"]

_Path = str | os.PathLike[str]

class RemoteDevice(Device):
    address: str
    facts: dict[str, Any]
    epoch: int
    @property
    def description(self) -> str: ...       # type: ignore[override]
    def __init__(self, address: str, name: str | None = ..., tls: Any = ..., timeout: float | None = ...,
                 find: Callable[[], str] | None = ...) -> None: ...
    def reopen(self) -> RemoteDevice: ...
    def close(self) -> None: ...

class Cluster:
    devices: list[RemoteDevice]
    client: Any
    def __init__(self, devices: Sequence[RemoteDevice], client: Any = ...,
                 stop: Sequence[Callable[[], None]] = ...) -> None: ...
    def close(self) -> None: ...
    def __enter__(self) -> Cluster: ...
    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
                 trace: TracebackType | None) -> None: ...

def local(n_workers: int = ..., processes: bool = ..., n_threads: int = ..., timeout: float | None = ...,
          memory_nbytes: int | None = ...) -> Cluster: ...
def connect(address: str | Sequence[str], tls: _Path | None = ..., timeout: float | None = ...) -> Cluster: ...
def serve(listen: str = ..., scheduler: str | None = ..., tls: _Path | None = ..., memory_nbytes: int | None = ...,
          n_threads: int | None = ..., keep_nbytes: int = ...,
          said: Callable[[str], object] = ..., own: Any = ...) -> dict[str, Any]: ...
def make_certificates(directory: _Path) -> list[str]: ...
