"""`ggjit imatrix`: the importance of each column of each matrix on a text, for `ggjit quantize --imatrix`."""
import os

from ggjit.display.progress import compiling
from ggjit.models.core.checks import read_text
from ggjit.models.files.save import refuse_existing, refuse_source
from ggjit.models.networks.evaluate import measure_imatrix
from ggjit.tools.command.common import add_data, add_gpu, add_strict, add_threads, chunk_options
from ggjit.tools.command.helpers import load
from ggjit.train.checkpoint import require_folder

EXAMPLES = (("ggjit imatrix f16.gguf --data wiki.txt -o imatrix.gguf", "then: ggjit quantize --imatrix imatrix.gguf"),
            ("ggjit imatrix f16.gguf --data wiki.txt --chunks 100", "the first 100 chunks of 512 tokens"))


def add_arguments(c):
    c.add_model("a GGUF that generates text")
    add_data(c)
    c.add_file("-o", "--output", metavar="OUT", default="imatrix.gguf", help="the file to write (imatrix.gguf)")
    c.add_argument("--force", action="store_true", help="replace OUT if it is there")
    c.add_argument("--process-output", action="store_true", help="the output matrix as well")
    add_strict(c)
    add_gpu(c)
    add_threads(c)


def run(args):
    refuse_existing(args.output, args.force)                # refuse before computing, not after
    refuse_source(args.output, args.model, args.data)
    require_folder(args.output)
    text, options = read_text(args.data), chunk_options(args)
    with compiling():
        m = load(args.model, args, n_ctx=args.n_ctx, reserve=False)
        found = measure_imatrix(m, text, output=args.process_output,
                                dataset=os.fsencode(args.data).decode("utf-8", "replace"), **options)
    found.save(args.output, force=args.force)
    partial = [name for name, s in found.sums.items() if not s.counts.all()]
    if not args.json:
        print(f"{args.output}: {len(found.sums)} matrices, {found.n_chunks} chunks of {found.chunk_size} tokens"
              + (f"; {len(partial)} have experts that no token went to" if partial else ""))
    return {"path": args.output, "matrices": len(found.sums), "chunks": found.n_chunks, "partial": partial}
