"""`ggjit ops`: the op suite."""
from ggjit.tools.command.common import count, positive
from ggjit.tools.suite.command import run  # noqa: F401

EXAMPLES = (("ggjit ops test -o soft_max,rope", "against float64 and the real ggml"),
            ("ggjit ops test --resume ops.jsonl", "the whole suite, in as many runs as it takes"),
            ("ggjit ops grad -o norm,rope", "gradients against differences in float64"))


def add_arguments(c):
    c.add_argument("mode", choices=("test", "perf", "support", "grad"))
    c.add_argument("-o", "--op", metavar="OP", help="ops or classes, comma separated, or one whole \"OP(params)\"")
    c.add_argument("-b", "--backend", metavar="DEVICE", default="CPU", help="device (CPU)")
    c.add_argument("-p", "--params", metavar="REGEX", help="cases whose parameters match")
    c.add_argument("-s", "--seed", type=count, default=0, metavar="N", help="of the inputs and the sample (0)")
    c.add_argument("--sample", type=positive, default=None, metavar="N", help="at most N cases, drawn by the seed")
    c.add_argument("-t", "--threads", type=positive, default=1, metavar="N", help="threads of both sides (1)")
    c.add_argument("-j", "--jobs", type=positive, default=None, metavar="N",
                   help="processes that share the test (one a core)")
    c.add_file("--resume", metavar="FILE", help="test: note outcomes in FILE, skip those there that passed")
