"""Gradients of whole networks beside PyTorch's: the networks of benchmarks/train.py."""
import numpy as np
import pytest
from helpers.requirements import benchmark

import ggjit as gg
from ggjit.tools.suite.compare import nmse


@pytest.mark.slow
@pytest.mark.parametrize("name", ["mlp", "cnn", "llama"])
def test_gradients_are_those_of_torch(need, name):
    need("torch", "gradients beside PyTorch's")
    import torch
    train, r = benchmark("train"), np.random.default_rng(0)
    net = train.Llama(40, n_ctx=16) if name == "llama" else train.Classifier(name)
    shape = (3, 16) if name == "llama" else (3, *net.shape)
    values = r.integers(0, 40, shape).astype(np.int32) if name == "llama" else train.normal(r, *shape)
    x, y, params = net.ours(3)
    n_rows, n_classes = y.shape
    labels = r.integers(0, n_classes, n_rows)
    gg.alloc_ctx_tensors(x.ctx, gg.init_backend("CPU"))
    x.set(values)
    hot = gg.from_numpy(x.ctx, np.eye(n_classes, dtype=np.float32)[labels])
    found = gg.compute(*gg.grad(gg.cross_entropy_loss(y, hot), list(params.values())))

    forward, theirs = net.torch()
    inputs = torch.tensor(values.astype(np.int64) if name == "llama" else values)
    torch.nn.functional.cross_entropy(forward(inputs), torch.tensor(labels)).backward()
    for key, got in zip(params, found, strict=True):
        want = theirs[key].grad.numpy().astype(np.float64)
        assert nmse(got.reshape(want.shape).astype(np.float64), want) < 1e-9, key
