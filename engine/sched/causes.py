"""Why the scheduler put a tensor on its backend: numbers for the jitted passes, with ggml's labels for people."""

(NONE, USER, DST, VSRC, INPUT, WEIGHT, OFFLOAD, SRC, GPU_DOWN, GPU_UP, REST_DOWN, REST_UP,
 SRC2, BEST, UPGRADE, FOLLOW_VIEW, FOLLOW_NODE, FIRST, UNSUPPORTED, MEMORY, BASE,
 COST) = range(22)

# (label in ggml's manner, what it means); {} is the number of the source
CAUSES = (
    ("", "not assigned"),
    ("usr", "pinned by the user"),
    ("1.dst", "its memory is already there"),
    ("1.vsrc", "it is a view of memory that is there"),
    ("1.inp", "a graph input: last backend"),
    ("1.wgt{}", "source {} is a weight that lies there"),
    ("1.off", "a large batch: worth moving the weights there"),
    ("1.src{}", "source {} lies there (highest priority, largest)"),
    ("2.gdn", "spread downwards from an accelerator"),
    ("2.gup", "spread upwards from an accelerator"),
    ("2.rdn", "spread downwards"),
    ("2.rup", "spread upwards"),
    ("2.src{}", "source {} was assigned there"),
    ("3.best", "most of its sources can be read there"),
    ("3.upg", "same memory, higher priority"),
    ("4.vsrc", "a view is where its base is"),
    ("4.cur", "first used there"),
    ("5.any", "first backend that supports the op"),
    ("5.sup", "the backend the rules chose does not support the op"),
    ("5.mem", "it writes memory that only this backend can reach"),
    ("5.vsrc", "the rules parted a view from its base"),
    ("6.cost", "moved: fewer bytes to copy"),
)


def text(cause, arg):
    """("1.wgt0", "source 0 is a weight that lies there")"""
    label, sentence = CAUSES[cause]
    return label.format(arg), sentence.format(arg)
