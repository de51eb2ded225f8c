"""`ggjit fit`: the best settings of a model within a memory limit, planned without reading its weights."""
from ggjit.api.rematerialize import BudgetError
from ggjit.models.networks.fit import fit
from ggjit.tools.command.common import (
    add_n_ctx,
    add_threads,
    console,
    nbytes,
    pairs,
    patterns,
    positive,
    text_nbytes,
)

EXAMPLES = (("ggjit fit m.gguf --memory 8G", "the longest context that fits"),
            ("ggjit fit m.gguf --memory 8GiB -c 16384", "with a context of 16,384 tokens"),
            ("ggjit fit m.gguf --memory 16G --device GPU0=24G", "layers and experts by device"))


def add_arguments(c):
    c.add_model("a GGUF, or a shape: llama-7b, llama-70b, ...")
    c.add_argument("--memory", type=nbytes, required=True, metavar="SIZE", help="of the process: 8G, 8GiB, 512MB")
    add_n_ctx(c, "context (the longest that fits)")
    c.add_argument("-b", "--n-batch", type=positive, default=None, metavar="N", help="tokens per batch (512, or less)")
    c.add_argument("--kv-type", default=None, metavar="TYPE", help="of the KV cache (F16, else Q8_0, Q4_0)")
    c.add_argument("--device", action="append", default=[], metavar="NAME=SIZE", help="a GPU for layers: GPU0=24G")
    c.add_argument("-ot", "--override-tensor", action="append", default=[], metavar="PATTERN=DEVICE",
                   help="tensors whose names match lie on that device, or CPU: exps=CPU")
    add_threads(c)
    c.add_file("--png", metavar="FILE", help="write the picture: bytes by context")


def run(args):
    placed = {"override_tensor": patterns(args.override_tensor)} if args.override_tensor else {}
    try:
        found = fit(args.model, args.memory, args.n_ctx, pairs("--device", args.device), args.n_batch, args.kv_type,
                    n_threads=args.threads, **placed)
    except BudgetError as e:
        raise BudgetError(f"{e}; that is {text_nbytes(e.minimum)}", e.minimum) from None
    if args.png:
        found.plot().figure.savefig(args.png, bbox_inches="tight", dpi=120)
    if not args.json:
        console().print(found)
    return {"options": found.options, "nbytes": found.nbytes, "limit": found.limit, "devices": found.devices,
            "terms": found.memory.terms,
            "others": [{"setting": str(c.setting), "nbytes": c.nbytes, "why": c.why} for c in found.others]}
