"""`ggjit quantize`: a model's matrices in smaller types."""
from ggjit.models.files.rewrite import quantize_gguf
from ggjit.tools.command.common import add_files, pairs, text_nbytes

EXAMPLES = (("ggjit quantize f16.gguf q4.gguf Q4_K_M", "llama-quantize's mixture, byte for byte"),
            ("ggjit quantize f16.gguf q2.gguf IQ2_XS --imatrix im.gguf", "types that need importances"),
            ("ggjit quantize f16.gguf q5.gguf Q5_K_S --tensor-type ffn_down=q8_0", "some tensors otherwise"))


def add_arguments(c):
    add_files(c, "a GGUF of F32, F16 or BF16")
    c.add_argument("type", metavar="TYPE", help="Q4_K_M, IQ4_XS, Q8_0, F16, ...; COPY: as they are")
    c.add_file("--imatrix", metavar="FILE", help="importances of columns, from `ggjit imatrix`")
    c.add_argument("--tensor-type", metavar="PATTERN=TYPE", action="append", default=[],
                   help="tensors in whose names the regular expression is found; may be repeated, the first counts")
    c.add_argument("--output-tensor-type", metavar="TYPE", help="of output.weight")
    c.add_argument("--token-embedding-type", metavar="TYPE", help="of token_embd.weight")
    c.add_argument("--leave-output-tensor", action="store_true", help="output.weight keeps its type")
    c.add_argument("--pure", action="store_true", help="no mixture: all matrices get the base type")
    c.add_argument("--allow-requantize", action="store_true", help="also from a file that is quantised already")
    c.add_argument("--keep-split", action="store_true", help="as many files as IN has")


def run(args):
    result = quantize_gguf(args.input, args.output, args.type, args.imatrix, pairs("--tensor-type", args.tensor_type),
                           args.output_tensor_type, args.token_embedding_type, args.leave_output_tensor, args.pure,
                           args.allow_requantize, args.keep_split, args.split_max_size, args.force)
    if not args.json:
        counts = {}
        for t in result["types"].values():
            counts[t] = counts.get(t, 0) + 1
        sizes = f"{text_nbytes(result['nbytes_before'])} -> {text_nbytes(result['nbytes'])}"
        print(f"{', '.join(result['paths'])}: {sizes}; "
              f"{', '.join(f'{n} {t}' for t, n in sorted(counts.items()))}")
    return result
