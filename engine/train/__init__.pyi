"""Types of the public names of ggjit.train."""
import os
from collections.abc import Callable, Sequence
from typing_extensions import disjoint_base
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from ggjit import Backend, Device, Scheduler, Tensor
from ggjit.ops.core.errors import GgjitError

__all__ = ["SGD", "AdamW", "Dataset", "History", "InUse", "NotFinite", "evaluate", "fit", "mean_in_chunks", "measure",
           "predict"]

_Rate = float | Callable[[int], float]
_Loss = Literal["cross_entropy", "mse", "mean", "sum"] | Callable[[Tensor, Tensor], Tensor]
_Target = Backend | Scheduler | str | None

class NotFinite(GgjitError, ArithmeticError): ...

class InUse(GgjitError, RuntimeError): ...

class AdamW:
    lr: _Rate
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    n_settings: int
    n_states: int
    def __init__(self, lr: _Rate = ..., beta1: float = ..., beta2: float = ..., eps: float = ...,
                 weight_decay: float = ...) -> None: ...
    def settings(self, step: int) -> npt.NDArray[np.float32]: ...
    def step(self, w: Tensor, g: Tensor, states: Sequence[Tensor], settings: Tensor) -> Tensor: ...

class SGD:
    lr: _Rate
    weight_decay: float
    n_settings: int
    n_states: int
    def __init__(self, lr: _Rate = ..., weight_decay: float = ...) -> None: ...
    def settings(self, step: int) -> npt.NDArray[np.float32]: ...
    def step(self, w: Tensor, g: Tensor, states: Sequence[Tensor], settings: Tensor) -> Tensor: ...

class Dataset:
    inputs: tuple[npt.NDArray[Any], ...]
    labels: npt.NDArray[Any] | None
    n: int
    shard: int
    def __init__(self, inputs: npt.ArrayLike | Sequence[npt.ArrayLike], labels: npt.ArrayLike | None = None,
                 shard: int = 1) -> None: ...
    def __len__(self) -> int: ...
    def rows(self, index: Any) -> tuple[tuple[npt.NDArray[Any], ...], npt.NDArray[Any] | None]: ...
    def split(self, fraction: float) -> tuple[Dataset, Dataset]: ...
    def order(self, seed: int | None, epoch: int) -> npt.NDArray[np.int64]: ...

@disjoint_base
class Evaluation(tuple[float, float | None]):
    def __new__(cls, total: float, n_rows: int, batch_losses: Sequence[float], right: int | None = None,
                predictions: npt.NDArray[np.int64] | None = None, summed: bool = False) -> Evaluation: ...
    @property
    def n_rows(self) -> int: ...
    @property
    def batch_losses(self) -> tuple[float, ...]: ...
    @property
    def predictions(self) -> npt.NDArray[np.int64] | None: ...
    @property
    def loss(self) -> float: ...
    @property
    def accuracy(self) -> float | None: ...
    @property
    def loss_uncertainty(self) -> float: ...
    @property
    def accuracy_uncertainty(self) -> float: ...
    def __add__(self, other: Evaluation) -> Evaluation: ...         # type: ignore[override]

class History:
    steps: list[float]
    loss: list[float]
    accuracy: list[float]
    val_loss: list[float]
    val_accuracy: list[float]
    seconds: list[float]
    stopped: str
    sample: str
    before: str
    after: str
    def __init__(self, steps: list[float] = ..., loss: list[float] = ..., accuracy: list[float] = ...,
                 val_loss: list[float] = ..., val_accuracy: list[float] = ..., seconds: list[float] = ...,
                 stopped: str = ..., sample: str = ..., before: str = ..., after: str = ...) -> None: ...
    def plot(self, axes: Any = None) -> Any: ...

_Data = Dataset | tuple[npt.ArrayLike | Sequence[npt.ArrayLike], npt.ArrayLike] | npt.ArrayLike

def fit(inputs: Tensor | Sequence[Tensor], outputs: Tensor, dataset: _Data, loss: _Loss = "cross_entropy",
        optimizer: AdamW | SGD | None = None, epochs: int = 1, batch: int | None = None, val_split: float = 0.0,
        seed: int | None = 0, budget: int | None = None, params: Sequence[Tensor] | None = None,
        clip: float | None = None, early_stop: int | None = None, checkpoint: str | os.PathLike[str] | None = None,
        callback: Callable[[History], Any] | None = None, backend: _Target = None,
        progress: bool = True, devices: Sequence[Device] | None = None) -> History: ...
def evaluate(inputs: Tensor | Sequence[Tensor], outputs: Tensor, dataset: _Data, loss: _Loss = "cross_entropy",
             backend: _Target = None) -> Evaluation: ...
def measure(inputs: Tensor | Sequence[Tensor], outputs: Tensor, loss: _Loss = "cross_entropy",
            optimizer: AdamW | SGD | None = None, batch: int | None = None, params: Sequence[Tensor] | None = None,
            clip: float | None = None, planner: Literal["best", "ggml", "ggml-2023"] = "best") -> Any: ...
def mean_in_chunks(loss_of: Callable[..., Tensor], *rows: Tensor, chunk: int) -> Tensor: ...
def predict(inputs: Tensor | Sequence[Tensor], outputs: Tensor, rows: _Data,
            backend: _Target = None) -> npt.NDArray[Any]: ...
