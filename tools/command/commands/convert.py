"""`ggjit convert`: a Hugging Face folder as a GGUF file."""
from ggjit.models.convert.convert import convert_folder
from ggjit.tools.command.common import add_out, text_nbytes

EXAMPLES = (("ggjit convert Qwen3-0.6B qwen3.gguf", "the source's type of 16 bits"),
            ("ggjit convert SmolVLM smolvlm.gguf --mmproj mmproj.gguf", "decoder and vision part"),
            ("ggjit convert Qwen3-0.6B qwen3.gguf --type F32", "then: ggjit quantize qwen3.gguf q4.gguf Q4_K_M"))


def add_arguments(c):
    c.add_file("folder", metavar="DIR", help="with config.json, tokenizer.json and *.safetensors")
    add_out(c)
    c.add_argument("--type", default="AUTO", metavar="TYPE", help="of the matrices: F32, F16, BF16, Q8_0 (as they are)")
    c.add_argument("--pre", metavar="NAME", help="the pre-tokenizer, where it is not found by itself")
    c.add_file("-mm", "--mmproj", metavar="FILE", help="write the part of the model that sees there")
    c.add_argument("--no-vocab", dest="vocabulary", action="store_false", help="without tokenizer: token ids only")


def run(args):
    result = convert_folder(args.folder, args.output, args.type, args.pre, args.vocabulary, args.force,
                            mmproj=args.mmproj)
    if not args.json:
        print(f"{', '.join(result['paths'])}: {result['arch']}, {result['tensors']} tensors, "
              f"{text_nbytes(result['nbytes'])}")
    return result
