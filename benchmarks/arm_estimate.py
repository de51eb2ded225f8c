"""Matrix products on ARM processors beside ggml's NEON loops: instructions and cycles by llvm-mca, an estimate on
any machine.

    python -m benchmarks.arm_estimate --llama llama.cpp -o benchmarks/results/arm-estimate.md

--llama is a checkout of llama.cpp, whose ggml-cpu files are compiled by clang for each processor, without SVE.  Both
sides are disassembled, and the innermost loop that multiplies most goes through llvm-mca; what stands around it (a
block's head, where a loop runs over the parts of a block) is not counted.  Nothing runs: caches, memory and the rest of
a program are not in these numbers.
"""
import argparse
import datetime
import pathlib
import re
import subprocess
import tempfile

from ggjit.tools.arm_code import assemblies

PROCESSORS = {"neoverse-n1": ("neon-v8.2", ""), "apple-m1": ("neon-v8.4", ""), "neoverse-v2": ("neon-v8.6", "+nosve")}
INTS, PER = {r"[su]s?dot\tv": 16, r"smmla\tv": 32}, 256
OUR_REPACKED = {r"sdot\t.*\.4b\[": 16, r"smmla\tv": 32}          # other dot products take scales apart
# Products of an instruction
PRODUCTS = {"f32": {r"fmla\tv\d+\.4s": 4},
            "f16": {r"fmlal2?\tv": 4, r"fmla\tv\d+\.8h": 8, r"fmla\tv\d+\.4s": 4},
            "bf16": {r"bfdot\tv": 8, r"bfmmla\tv": 16, r"fmla\tv\d+\.4s": 4, r"fmul\tv\d+\.4s": 4}}
FILES = {"dot": "arch/arm/quants.c", "float": "vec.cpp", "repack": "arch/arm/repack.cpp"}
ONE = ("f32", "f16", "bf16", "q8_0", "q4_0", "q5_0", "q4_1", "iq4_nl", "mxfp4", "q2_K", "q3_K", "q4_K", "q5_K", "q6_K",
       "iq4_xs")
REPACKED = {"q4_0": 4, "q8_0": 4, "iq4_nl": 4, "q4_K": 8, "q5_K": 8, "q6_K": 8}         # type: ggml's rows of a block


def partner(type):
    return "q8_K" if type.endswith("_K") or type == "iq4_xs" else "q8_1" if type == "q4_1" else "q8_0"


def rows(processor):
    """(section, our product, ggml's file and function)"""
    for type in ONE:
        function = f"ggml_vec_dot_{type}"
        yield "one column", f"{type}:1", ("float", function) if type in PRODUCTS else (
            "dot", f"{function}_{partner(type)}")
    width = 8 if processor == "neoverse-v2" else 4          # ggml's layout where there is i8mm; IQ4_NL has one
    for kernel, n, section in (("gemv", 1, "repacked, one column"), ("gemm", 64, "repacked, 64 columns")):
        for type, lanes in REPACKED.items():
            layout = f"{type}_{lanes}x{4 if type == 'iq4_nl' else width}"
            yield section, f"repacked-{type}:{n}", ("repack", f"ggml_{kernel}_{layout}_{partner(type)}")
    for type in ("f32", "q4_0", "q8_0", "q4_K", "q6_K"):
        yield "as in the file, 64 columns", f"{type}:64", None


# ---------------------------------------------------------------- loops
def run(*command, text=None):
    return subprocess.run([str(x) for x in command], input=text, stdout=subprocess.PIPE, check=True, text=True).stdout


def instructions(llvm, obj, function=None):
    """[(address, instruction)] of a function, or of the whole object."""
    chosen = [f"--disassemble-symbols={function}"] if function else ["-d"]
    text = run(f"llvm-objdump{llvm}", *chosen, "--no-show-raw-insn", "--no-print-imm-hex", obj)
    return [(int(m[1], 16), m[2]) for m in re.finditer(r"^ *([0-9a-f]+):\s+(\S.*)$", text, re.M)]


def innermost(code):
    """Lists of the instructions of each innermost loop, the branch back with a label in place of its target."""
    at = {address: i for i, (address, _) in enumerate(code)}
    spans = []
    for i, (_, line) in enumerate(code):
        jump = re.match(r"(?:b\.?\w*|cbn?z|tbn?z)\t.*?0x([0-9a-f]+) <", line)
        if jump and at.get(int(jump[1], 16), i + 1) <= i:
            spans.append((at[int(jump[1], 16)], i))
    for a, z in spans:
        if not any(a <= x and y <= z and (x, y) != (a, z) for x, y in spans):
            yield [re.sub(r"0x[0-9a-f]+ <.*>", "0", line) for _, line in code[a:z + 1]]


def products(loop, counted):
    """How many weights times columns it multiplies; counted: {instruction: its products}."""
    return sum(n for line in loop for pattern, n in counted.items() if re.match(pattern, line))


def hot(code, counted, one_column):
    """The innermost loop that multiplies most, of those the shortest (a row's end is another); of one column, without
    the instruction that takes two."""
    loops = [x for x in innermost(code) if not (one_column and any("mmla\t" in line for line in x))]
    return max(loops, key=lambda x: (products(x, counted), -len(x)), default=None)


def cycles(llvm, loop, processor):
    said = run(f"llvm-mca{llvm}", "-mtriple=aarch64", f"-mcpu={processor}", "-iterations=200",
               "-mattr=+dotprod,+fullfp16,+fp16fml,+i8mm,+bf16", text="\n".join(loop))
    return int(re.search(r"Total Cycles:\s+(\d+)", said)[1]) / 200


def measure(llvm, code, counted, processor, one_column):
    """(instructions, cycles) of PER products, or None where there is no such loop."""
    loop = hot(code, counted, one_column)
    n = products(loop, counted) if loop else 0
    return (len(loop) * PER / n, cycles(llvm, loop, processor) * PER / n) if n else None


# ---------------------------------------------------------------- both sides
def compile_ggml(args, processor, option, folder):
    """{file: its object}"""
    cpu, out = args.llama / "ggml/src/ggml-cpu", {}
    includes = [x for path in args.include for x in ("-isystem", path)]
    for name, path in FILES.items():
        out[name] = folder / f"{name}-{processor}.o"
        compiler, standard = ("clang++", "c++17") if path.endswith("cpp") else ("clang", "c11")
        run(f"{compiler}{args.llvm}", "-target", "aarch64-linux-gnu", *includes, f"-std={standard}",
            f"-mcpu={processor}{option}", "-O3", "-DNDEBUG", "-D_GNU_SOURCE", f"-I{cpu.parent.parent / 'include'}",
            f"-I{cpu.parent}", f"-I{cpu}", "-c", cpu / path, "-o", out[name])
    return out


def compile_ours(llvm, level, names, folder):
    """{name: the code of its kernel}"""
    out = {}
    for name, (_, text) in assemblies(level, names).items():
        obj = folder / f"{name.replace(':', '-')}-{level}.o"
        run(f"clang{llvm}", "-target", "aarch64-linux-gnu", "-march=armv8.6-a+fp16fml", "-c", "-x", "assembler", "-",
            "-o", obj, text=text)
        out[name] = instructions(llvm, obj)
    return out


def estimate(args, processor, folder):
    """Yields (section, product, ours, ggml's), each (instructions, cycles) of PER products or None."""
    llvm, (level, option) = args.llvm, PROCESSORS[processor]
    wanted = list(rows(processor))
    ours = compile_ours(llvm, level, [name for _, name, _ in wanted], folder)
    ggml = compile_ggml(args, processor, option, folder)
    for section, name, their in wanted:
        counted, one = PRODUCTS.get(name.partition(":")[0], INTS), section == "one column"
        theirs = their and measure(llvm, instructions(llvm, ggml[their[0]], their[1]), counted, processor, one)
        counted = OUR_REPACKED if name.startswith("repacked") else counted
        yield section, name, measure(llvm, ours[name], counted, processor, one), theirs


def table(found):
    """found: {processor: rows of `estimate`}"""
    yield "# Products on ARM, an estimate"
    yield ""
    yield (f"These figures are estimates of {datetime.date.today()}; nothing was run. `python -m "
           "benchmarks.arm_estimate` compiles ggjit's kernels and llama.cpp's source (clang, without SVE) and passes "
           "the innermost loop of each to llvm-mca. llvm-mca has models of the processors and says how many cycles a "
           "loop takes if all data are in the first-level cache. Its model for Apple is that of an older core. "
           f"Instructions and cycles are counted for the product of {PER} weights with the activations of one token. "
           "In the last column, a figure below 1 means that ggjit needs fewer cycles.")
    yield ""
    yield ("In the F16 rows the two programs do different work: ggml multiplies and sums in float16, ggjit sums in "
           "float32. With fp16fml (v8.4 and later) one instruction multiplies float16 numbers and adds the products "
           "to float32 sums. Without fp16fml (neoverse-n1) ggjit first converts float16 to float32, so it takes more "
           "than twice ggml's cycles.")
    for processor, lines in found.items():
        yield ""
        yield f"## {processor} ({PROCESSORS[processor][0]})"
        last = None
        for section, name, ours, theirs in lines:
            if section != last:
                yield ""
                yield f"| {section} | instructions | ggml's | cycles | ggml's | cycles / ggml's |"
                yield "| --- | --- | --- | --- | --- | --- |"
                last = section
            ratio = f"{ours[1] / theirs[1]:.2f}" if ours and theirs else "-"
            cells = [f"{x[i]:.1f}" if x else "-" for i in (0, 1) for x in (ours, theirs)]
            yield f"| {name.removeprefix('repacked-').partition(':')[0].upper()} | {' | '.join(cells)} | {ratio} |"


def main():
    parser = argparse.ArgumentParser(prog="python -m benchmarks.arm_estimate", description=__doc__.partition("\n")[0])
    parser.add_argument("--llama", required=True, type=pathlib.Path, help="a checkout of llama.cpp")
    parser.add_argument("--include", nargs="*", default=[], metavar="FOLDER", help="headers of the C++ and the C "
                        "library, in this order, where clang finds none for aarch64 by itself")
    parser.add_argument("--llvm", default="-22", help="what follows the names of clang, llvm-objdump and llvm-mca")
    parser.add_argument("--processors", nargs="+", choices=PROCESSORS, default=list(PROCESSORS))
    parser.add_argument("-o", "--output", type=pathlib.Path)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        found = {p: list(estimate(args, p, pathlib.Path(folder))) for p in args.processors}
    text = "\n".join(table(found)) + "\n"
    if args.output:
        args.output.write_text(text, "utf-8")
    print(text, end="")


if __name__ == "__main__":
    main()
