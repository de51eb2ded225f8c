"""`ggjit edit`: changes keys and tensors of a GGUF file, splits a model into several files or joins them."""
from ggjit.models.files.rewrite import edit_gguf
from ggjit.tools.command.common import add_files, pairs, text_nbytes, value
from ggjit.tools.command.helpers import add_lora, scaled

EXAMPLES = (("ggjit edit m.gguf n.gguf --set-key general.name=mine --remove-key tokenizer.chat_template", ""),
            ("ggjit edit m.gguf parts.gguf --split-max-size 2G", "parts-00001-of-00003.gguf, ..."),
            ("ggjit edit m.gguf merged.gguf --lora notes.gguf", "an adapter merged into the weights"))


def add_arguments(c):
    add_files(c)
    c.add_argument("--set-key", metavar="KEY=VALUE", action="append", default=[],
                   help="VALUE as JSON (7, 0.5, true, [1, 2]), anything else is a text; may be repeated")
    c.add_argument("--remove-key", metavar="KEY", action="append", default=[])
    c.add_argument("--rename", metavar="TENSOR=NAME", action="append", default=[])
    c.add_argument("--set-tensor-type", metavar="TENSOR=TYPE", action="append", default=[])
    add_lora(c)


def run(args):
    keys = {key: value(text) for key, text in pairs("--set-key", args.set_key).items()}
    result = edit_gguf(args.input, args.output, keys, args.remove_key, pairs("--rename", args.rename),
                       pairs("--set-tensor-type", args.set_tensor_type), args.split_max_size, args.force,
                       lora=scaled(args.lora))
    if not args.json:
        print(f"{', '.join(result['paths'])}: {text_nbytes(result['nbytes'])}")
    return result
