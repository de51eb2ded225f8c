"""The content of a graph's picture: boxes and arrows, with each layer of a network folded into one box."""
import collections
import dataclasses
import re

from ggjit.alloc.report import mib
from ggjit.graphs.layers import WEIGHT, layers
from ggjit.ops.core.errors import ParamError
from ggjit.ops.core.printable import printable
from ggjit.ops.core.record import OP, VIEW_OPS
from ggjit.ops.core.shape import describe
from ggjit.tensors.summary import label, op_name, state

FOLD_ABOVE = 40                 # boxes: larger graphs are folded by default
MANY_READERS = 3                # a leaf read by more boxes is named in them instead of drawn
MAX_CHARS = 38                  # longest line of a box


@dataclasses.dataclass
class Box:
    """kind: "node", "leaf", "outside" (computed elsewhere) or "group"; seconds: of a profiled run, None if unknown."""
    kind: str
    title: str
    lines: list
    tensors: list
    backend: str | None = None
    seconds: float | None = None
    mentions: list = dataclasses.field(default_factory=list)

    @property
    def texts(self):
        cut = lambda s: s if len(s) <= MAX_CHARS else s[:MAX_CHARS - 1] + "\u2026"            # noqa: E731
        extra = ["+ " + ", ".join(self.mentions)] if self.mentions else []
        return [cut(s) for s in (self.title, *self.lines, *extra)]


class Boxes:
    """boxes: {key: Box}, sources first; arrows: pairs of keys; leaves: keys of leaves; folded: names of layers.

    expand, views, profile, sched: see `draw` in drawing.py.  fold=False: no layers.
    """

    def __init__(self, nodes, expand=None, views=False, profile=None, sched=None, fold=True):
        self.nodes, self.views, self.profile, self.sched = list(nodes), views, profile, sched
        self.times, self.moved, self.fused, self.computed_by = (
            {}, {}, {}, {}) if profile is None else (profile.seconds_by_tensor(), profile.nbytes_by_tensor(),
                                                     profile.fused_into(), profile.backend_by_tensor())
        self.total = sum(self.times.get(t.id, 0.0) for t in self.nodes)
        self.layer = layers(self.nodes) if fold else {t.id: None for t in self.nodes}
        shown = sum(t.op not in VIEW_OPS for t in self.nodes)
        known = {g for g in self.layer.values() if g is not None}
        if isinstance(expand, str | list | tuple | set):
            wanted = {expand} if isinstance(expand, str) else set(expand)
            if wanted - known:
                raise ParamError(f"draw: no layer {', '.join(sorted(wanted - known))}; this graph has "
                                 f"{', '.join(sorted(known, key=natural)) or 'no layers'}")
        else:
            wanted = known if expand or expand is None and shown <= FOLD_ABOVE else set()
        self.folded = known - wanted
        self._collect()

    def _collect(self):
        key, self.boxes = {}, {}                        # key: {tensor id: key of its box}
        for t in self.nodes:
            group = self.layer[t.id]
            if group in self.folded:
                key[t.id] = ("group", group)
                self.boxes.setdefault(key[t.id], Box("group", group, [], [])).tensors.append(t)
            elif t.op in VIEW_OPS and t.op != OP.NONE and not self.views:
                continue                # a view is drawn as the tensor it shows
            else:
                key[t.id] = ("node", t.id)
                self.boxes[key[t.id]] = Box("node", *self._words(t), [t])
        uses = collections.defaultdict(dict)            # tensor outside -> boxes that read it
        arrows = []
        for t in self.nodes:
            if t.id not in key:
                continue
            for s in self._read(t, key):
                if s.id in key:
                    arrows.append((key[s.id], key[t.id]))
                else:
                    uses[s.id][key[t.id]] = s
        order = {k: i for i, k in enumerate(self.boxes)}
        self.arrows = [(a, b) for a, b in dict.fromkeys(arrows) if order[a] < order[b]]
        self._add_leaves(uses)
        for box in self.boxes.values():
            self._finish(box)

    def _read(self, t, key):
        """The sources of t that have boxes: views that are not drawn are followed to what they view."""
        for s in t.src:
            while s is not None and s.id not in key and s.op in VIEW_OPS and s.src and not self.views:
                s = s.src[0]
            if s is not None:
                yield s

    def _add_leaves(self, uses):
        """Boxes of tensors that nodes read and that are not nodes themselves, or mentions of them in their readers."""
        leaves = {}
        for i, readers in uses.items():
            t = next(iter(readers.values()))
            groups = [k for k in readers if k[0] == "group"]
            if len(readers) == 1 and groups:            # a layer's own weight
                self.boxes[groups[0]].tensors.append(t)
                if not WEIGHT.search(t.name):
                    self.boxes[groups[0]].mentions.append(label(t))
            elif len(readers) > MANY_READERS or groups and len(groups) == len(readers):
                for k in readers:
                    self.boxes[k].mentions.append(label(t))
            else:
                kind = "leaf" if t.op == OP.NONE else "outside"
                leaves["leaf", i] = Box(kind, *self._words(t), [t])
                self.arrows += [(("leaf", i), k) for k in readers]
        self.leaves = list(leaves)
        self.boxes = {**leaves, **self.boxes}

    def _words(self, t):
        """(title, lines) of one tensor."""
        op = op_name(t) if t.op else ""
        name = printable(t.name)
        kind = describe(t)[len(name or "tensor") + 1:]          # type and shape
        return (name, [f"{op} {kind}" if op else kind]) if name else (op or label(t), [kind])

    def _finish(self, box):
        """Backend, time and bytes of a box whose members are known."""
        box.mentions = list(dict.fromkeys(box.mentions))
        computed = [t for t in box.tensors if t.op not in VIEW_OPS]
        timed = [self.times[t.id] for t in computed if t.id in self.times]
        if timed and box.kind in ("node", "group"):
            box.seconds = sum(timed)
        nodes = [t for t in computed if t.op != OP.NONE] or box.tensors
        box.backend = collections.Counter(map(self._backend, nodes)).most_common(1)[0][0]
        nbytes = sum(t.nbytes for t in box.tensors if t.view_src is None)
        if box.kind == "group":
            n = sum(t.op != OP.NONE and t.op not in VIEW_OPS for t in box.tensors)
            weights = sum(t.nbytes for t in box.tensors if t.op == OP.NONE and WEIGHT.search(t.name))
            box.lines.append(f"{n} nodes, weights {mib(weights)}" if weights else f"{n} nodes")
        if box.seconds is not None:
            nbytes = sum(self.moved.get(t.id, 0) for t in computed)
            box.lines.append(f"{time_text(box.seconds)} ({box.seconds / (self.total or 1):.1%}), {mib(nbytes)} moved")
        elif box.kind == "leaf":
            box.lines[-1] += f", {mib(nbytes)}"
        elif box.kind == "node" and box.tensors[0].id in self.fused:
            box.lines.append(f"fused into {self.fused[box.tensors[0].id]}")

    def _backend(self, t):
        if self.sched is not None:
            b = self.sched.get_tensor_backend(t)
            return b.name if b is not None else None
        if t.id in self.computed_by:
            return self.computed_by[t.id]
        if t.op and t.base.op == OP.NONE:       # written into a leaf's memory, by a backend not known yet
            return None
        place = state(t)
        return place.split(" ", 1)[0] if " buffer " in place else None


def time_text(seconds):
    """12.3 us, 4.56 ms, 1.20 s."""
    for unit, scale in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)):
        if seconds >= scale:
            return f"{seconds / scale:.3g} {unit}"
    return f"{seconds * 1e9:.0f} ns"


def natural(text):
    return [int(x) if x.isdigit() else x for x in re.split(r"(\d+)", text)]
