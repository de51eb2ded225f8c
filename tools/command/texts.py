"""Files of texts that commands read, and of results in the same order, computed here or by workers."""
import contextlib
import csv
import json
import os

import numpy as np

import ggjit as gg
from ggjit.display.progress import bar
from ggjit.models.networks.bulk import drop_kept
from ggjit.ops.core.errors import BadFile, ParamError, extra
from ggjit.ops.core.json_text import parse_json
from ggjit.ops.core.whole_file import whole_file
from ggjit.tools.command.common import positive

INPUTS = ".jsonl", ".csv", ".txt", ".parquet"


def add_texts(c, results):
    """The options --input, --output, --column, --cluster, --workers, --tls."""
    c.add_file("--input", metavar="FILE", help="texts: .jsonl (an object a line), .csv (with a header), "
               ".txt (a text a line), .parquet")
    c.add_file("--output", metavar="FILE", help=f"{results}, in the order of the input; a run that was stopped goes on "
               "where it was")
    c.add_argument("--column", default="text", metavar="NAME", help="key or column that holds the text (text)")
    where = c.add_mutually_exclusive_group()
    where.add_argument("--cluster", metavar="ADDRESS", help="a Dask scheduler, whose workers read the same model file")
    where.add_argument("--workers", type=positive, metavar="N", help="so many processes of this machine")
    c.add_file("--tls", metavar="DIR", help="certificates for --cluster")


def compute_file(args, kinds, compute, write):
    """Results of --input written to --output: {"texts", "seconds", "output"} and what `write` returns.

    compute(texts, cluster, keep, progress): the results; write(path, texts, results): the file, of one of `kinds`.
    Errors: ParamError, BadFile, those of both.
    """
    wanted = f"a file {', '.join(kinds[:-1])} or {kinds[-1]}"
    if args.output is None:
        raise ParamError(f"--output is missing: expected {wanted}")
    kind = os.path.splitext(args.output)[1]
    if kind not in kinds:
        raise ParamError(f"--output {args.output}: expected {wanted}")
    if os.path.exists(args.output) and os.path.exists(args.input) and os.path.samefile(args.input, args.output):
        raise ParamError(f"--output {args.output} is the --input; choose another file for the results")
    if kind == ".parquet":
        extra("pyarrow", "parquet")             # a missing extra is reported before anything is computed
    texts, keep = texts_of(args.input, args.column), f"{args.output}.parts"
    with _cluster(args) as cluster, bar("texts", len(texts)) as step:
        results = compute(texts, cluster, keep, step)
    facts = write(args.output, texts, results)
    drop_kept(keep)
    return {"texts": len(texts), "output": args.output, **facts}


def _cluster(args):
    if args.cluster is not None:
        return gg.cluster.connect(args.cluster, tls=args.tls)
    return contextlib.nullcontext() if args.workers is None else gg.cluster.local(args.workers)


# ---------------------------------------------------------------- in
def texts_of(path, column):
    """The texts of a file, in its order.  Errors: ParamError (another kind of file), BadFile with the line."""
    kind = os.path.splitext(path)[1]
    if kind not in INPUTS:
        raise ParamError(f"--input {path}: expected a file {', '.join(INPUTS[:-1])} or {INPUTS[-1]}")
    if kind == ".parquet":
        return _of_parquet(path, column)
    with open(path, encoding="utf-8", newline="" if kind == ".csv" else None) as f:
        try:
            if kind == ".txt":
                return [line.rstrip("\n") for line in f]
            if kind == ".csv":
                rows = csv.DictReader(f, strict=True)
                return [_text(row, column, path, rows.line_num) for row in rows]
            return [_text(_json(line, path, k), column, path, k) for k, line in enumerate(f, 1) if line.strip()]
        except (UnicodeDecodeError, csv.Error) as e:
            raise BadFile(f"{path}: {e}; expected UTF-8 text of a {kind} file") from None


def _json(line, path, k):
    try:
        return parse_json(line)
    except ValueError as e:
        raise BadFile(f"{path} line {k}: {e}; expected UTF-8 text of a .jsonl file, a JSON object a line") from None


def _of_parquet(path, column):
    parquet, arrow = extra("pyarrow.parquet", "parquet"), extra("pyarrow", "parquet")
    try:
        with parquet.ParquetFile(path) as f:
            names = f.schema_arrow.names
            rows = f.read([column]).column(0).to_pylist() if column in names else None
    except (arrow.ArrowException, UnicodeDecodeError) as e:
        raise BadFile(f"{path}: {e}; expected a .parquet file") from None
    if rows is None:
        raise BadFile(f"{path}: no column {column!r} ({', '.join(names):.80}); name it with --column")
    return [_text({column: text}, column, path, k) for k, text in enumerate(rows, 1)]


def _text(row, column, path, line):
    text = row.get(column) if isinstance(row, dict) else None
    if not isinstance(text, str):
        names = ", ".join(map(str, row)) if isinstance(row, dict) else repr(row)
        raise BadFile(f"{path} line {line}: no text under {column!r} ({names:.80}); name the column with --column")
    return text


# ---------------------------------------------------------------- out
def write_jsonl(path, rows):
    """A JSON object a line."""
    with whole_file(path) as f:
        for row in rows:
            f.write(json.dumps(row).encode() + b"\n")


def write_parquet(path, columns):
    """columns: {name: list of strings, or an (n, dim) float32 array, which becomes a list of dim numbers a row}."""
    arrow, parquet = extra("pyarrow", "parquet"), extra("pyarrow.parquet", "parquet")
    made = {name: arrow.FixedSizeListArray.from_arrays(arrow.array(x.reshape(-1)), x.shape[1])
            if isinstance(x, np.ndarray) else arrow.array(x, arrow.string()) for name, x in columns.items()}
    with whole_file(path) as f:
        parquet.write_table(arrow.table(made), f)
