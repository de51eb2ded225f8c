"""`ggjit worker`: lets drivers use this machine's processor and memory."""
import sys

import ggjit as gg
from ggjit.models.files.own_weights import OwnWeights
from ggjit.tools.command.common import add_threads

EXAMPLES = (("ggjit worker", "for this machine alone, at tcp://127.0.0.1:8790"),
            ("ggjit worker --make-certs certs", "certificates: copy the folder to every machine"),
            ("ggjit worker --listen tls://10.0.0.2:8790 --tls certs", "for drivers with certificates"))


def add_arguments(c):
    where = c.add_mutually_exclusive_group()
    where.add_argument("--listen", metavar="ADDRESS", default="tcp://127.0.0.1:8790",
                       help="tcp://127.0.0.1:PORT or tls://HOST:PORT; port 0: any (tcp://127.0.0.1:8790)")
    where.add_argument("--scheduler", metavar="ADDRESS", help="a Dask scheduler to work for (restarts after failures)")
    where.add_argument("--make-certs", metavar="DIR", help="write a CA and the certificate it signed, and end")
    c.add_file("--tls", metavar="DIR", help="certificates: what `--make-certs` wrote")
    c.add_argument("--memory", type=float, metavar="GB", help="at most so much for drivers (default: all)")
    c.add_argument("--keep", type=float, default=0.0, metavar="GB",
                   help="of weights kept on disk: a model loaded again is not sent again (0)")
    c.add_file("--models", metavar="DIR", help="model files of this machine: weights found there are not sent")
    add_threads(c)


def run(args):
    if args.make_certs is not None:
        written = gg.cluster.make_certificates(args.make_certs)
        if not args.json:
            print("\n".join(written))
        return {"written": written}
    memory_nbytes = None if args.memory is None else int(args.memory * 1e9)
    return gg.cluster.serve(args.listen, args.scheduler, args.tls, memory_nbytes, args.threads, int(args.keep * 1e9),
                            own=None if args.models is None else OwnWeights(args.models),
                            said=lambda line: print(line, file=sys.stderr if args.json else sys.stdout, flush=True))
