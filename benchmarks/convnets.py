"""Two networks of pictures, each as arrays, as nodes and in PyTorch: a U-Net and a ResNet of 3, 4, 6, 3 blocks."""
import numpy as np

import ggjit as gg
from benchmarks.train import normal

GROUPS, EPS = 4, 1e-5


class ConvNet:
    """Layers that are written once, for what computes them: `Nodes` or `Torch`.  Outputs: classes of each row."""

    def __init__(self, side, width, n_classes=10, seed=0):
        self.side, self.width, self.n_classes, self.arrays = side, width, n_classes, {}
        self._rng = np.random.default_rng(seed)
        self.forward(Shapes(self))

    def kernel(self, name, n_out, n_in, size):
        if name not in self.arrays:
            self.arrays[name] = normal(self._rng, n_out, n_in, size, size, size=(n_in * size * size) ** -0.5)
        return name

    def ours(self, batch):
        ctx = gg.Context()
        p = {n: gg.set_param(gg.from_numpy(ctx, a.copy(), n)) for n, a in self.arrays.items()}
        x = ctx.new_tensor(gg.F32, (self.side, self.side, 3, batch), name="x")
        with ctx:
            return x, self.forward(Nodes(self, p, x)), p

    def torch(self):
        import torch
        p = {n: torch.nn.Parameter(torch.tensor(a)) for n, a in self.arrays.items()}
        return lambda x: self.forward(Torch(self, p, x)), p


class UNet(ConvNet):
    """Three times two convolutions with norms, pooled; the way back with what was skipped; a class for every pixel."""
    n_levels = 3

    def forward(self, do):
        def block(x, name, n_in, n_out):
            for i, n in enumerate((n_in, n_out)):
                x = do.relu(do.norm(do.conv(x, f"{name}.{i}", n, n_out, 3)))
            return x
        x, n, n_in, skipped = do.input, self.width, 3, []
        for level in range(self.n_levels):
            x = block(x, f"down{level}", n_in, n)
            skipped.append((x, n))
            x, n_in, n = do.pool(x), n, 2 * n
        x = block(x, "bottom", n_in, n)
        for level, (skip, n_skip) in reversed(list(enumerate(skipped))):
            x = block(do.join(do.enlarged(x), skip), f"up{level}", n + n_skip, n_skip)
            n = n_skip
        return do.pixels(do.conv(x, "out", n, self.n_classes, 1))


class ResNet(ConvNet):
    blocks = 3, 4, 6, 3

    def forward(self, do):
        n = self.width
        x = do.relu(do.norm(do.conv(do.input, "stem", 3, n, 3)))
        for stage, n_blocks in enumerate(self.blocks):
            for i in range(n_blocks):
                step, n_in, same, name = 2 if stage and not i else 1, n, x, f"{stage}.{i}"
                if step == 2:
                    n *= 2
                    same = do.norm(do.conv(x, f"{name}.shortcut", n_in, n, 1, 2))
                h = do.relu(do.norm(do.conv(x, f"{name}.0", n_in, n, 3, step)))
                x = do.relu(do.add(do.norm(do.conv(h, f"{name}.1", n, n, 3)), same))
        return do.classes(x, "out", n, self.n_classes)


# ---------------------------------------------------------------- what computes the layers
class Shapes:
    """Nothing: the kernels are asked for."""
    input = None

    def __init__(self, net):
        self.net = net

    def conv(self, x, name, n_in, n_out, size, step=1):
        self.net.kernel(name, n_out, n_in, size)

    def classes(self, x, name, n_in, n_out):
        self.net.arrays.setdefault(name, normal(self.net._rng, n_out, n_in))

    def __getattr__(self, name):
        return lambda *args: None


class Nodes:
    def __init__(self, net, p, x):
        self.net, self.p, self.input = net, p, x

    def conv(self, x, name, n_in, n_out, size, step=1):
        return gg.conv_2d_direct(self.p[name], x, step, step, size // 2, size // 2, 1, 1)

    def norm(self, x):
        return gg.group_norm(x, GROUPS, EPS)

    relu, add = staticmethod(gg.relu), staticmethod(gg.add)

    def pool(self, x):
        return gg.pool_2d(x, 0, 2, 2, 2, 2, 0, 0)

    def enlarged(self, x):
        return gg.upscale(x, 2, 0)                      # nearest

    def join(self, x, skip):
        return gg.concat(x, skip, 2)

    def pixels(self, x):
        w, h, c, n = x.ne
        return gg.reshape_2d(gg.cont(gg.permute(x, 1, 2, 0, 3)), c, w * h * n)

    def classes(self, x, name, n_in, n_out):
        w, h, c, n = x.ne
        return gg.mul_mat(self.p[name], gg.reshape_2d(gg.mean(gg.reshape_2d(x, w * h, c * n)), c, n))


class Torch:
    def __init__(self, net, p, x):
        from torch.nn import functional
        self.net, self.p, self.input, self.F = net, p, x, functional

    def conv(self, x, name, n_in, n_out, size, step=1):
        return self.F.conv2d(x, self.p[name], stride=step, padding=size // 2)

    def norm(self, x):
        return self.F.group_norm(x, GROUPS, eps=EPS)

    def relu(self, x):
        return self.F.relu(x)

    def add(self, a, b):
        return a + b

    def pool(self, x):
        return self.F.max_pool2d(x, 2)

    def enlarged(self, x):
        return self.F.interpolate(x, scale_factor=2)

    def join(self, x, skip):
        import torch
        return torch.cat([x, skip], 1)

    def pixels(self, x):
        return x.permute(0, 2, 3, 1).flatten(0, 2)

    def classes(self, x, name, n_in, n_out):
        return self.F.linear(x.mean((2, 3)), self.p[name])
