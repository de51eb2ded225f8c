"""`ggjit serve` beside llama.cpp's server: tokens a second and seconds of an answer, with 1 to 64 clients at once.

    python -m benchmarks.serve MODEL.gguf [--llama-server BIN] [--clients 1,8,64] [--threads N] [--rounds N] > TABLE.md

BIN: llama-server of llama.cpp's source, built for this processor (cmake -B build -DGGML_NATIVE=ON
-DCMAKE_BUILD_TYPE=Release; cmake --build build --target llama-server).  Each server has a process of its own; they take
turns, and each row shows medians with minimum and maximum.  Every client asks for N_TOKENS greedy tokens of a prompt of
its own over HTTP, and waits for all of them.  ratio = our tokens a second / the peer's: above 1 we are faster.  Each of
our answers has to be the text that `m.generate` gives for the prompt alone; else the run ends with both texts.
"""
import argparse
import concurrent.futures
import contextlib
import http.client
import json
import socket
import statistics
import subprocess
import sys
import time

from benchmarks.machine import cpu_model, idle_check
from benchmarks.report import Spread, number
from ggjit.models import load_model

N_TOKENS, N_CTX = 64, 512
SUBJECTS = "the sea", "a garden in winter", "how bread is made", "two old friends", "a train at night", "a number"
START_SECONDS = 300


def ours(model, n_clients, n_threads):
    return [sys.executable, "-m", "ggjit_command", "serve", model, "-np", str(n_clients), "-c", str(N_CTX),
            "-t", str(n_threads)]


def llama_server(program):
    def command(model, n_clients, n_threads):
        return [program, "-m", model, "-np", str(n_clients), "-c", str(N_CTX * n_clients), "-t", str(n_threads),
                "--no-webui"]
    return command


@contextlib.contextmanager
def running(command):
    """The port of a server that answers."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    process = subprocess.Popen([*command, "--port", str(port)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        until = time.monotonic() + START_SECONDS
        while not _is_ready(port):
            if process.poll() is not None or time.monotonic() > until:
                raise SystemExit(f"{' '.join(command)} does not answer; its status is {process.poll()}")
            time.sleep(0.2)
        yield port
    finally:
        process.terminate()
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()


def _is_ready(port):
    try:
        return _ask(port, "GET", "/health", None)[0] == 200
    except OSError:
        return False


def _ask(port, method, path, body):
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=600)
    try:
        connection.request(method, path, body and json.dumps(body), {"Content-Type": "application/json"})
        answer = connection.getresponse()
        return answer.status, answer.read()
    finally:
        connection.close()


def prompt(i):
    """Of client i."""
    return f"{'Once upon a time. ' * (i % 5)}A few lines about {SUBJECTS[i % len(SUBJECTS)]}, number {i}:"


def answered(port, i):
    """(text of an answer, its tokens, seconds)"""
    t0 = time.perf_counter()
    status, raw = _ask(port, "POST", "/v1/completions", {
        "model": "model", "prompt": prompt(i), "max_tokens": N_TOKENS, "temperature": 0, "ignore_eos": True})
    if status != 200:
        raise SystemExit(f"status {status}: {raw[:300]!r}")
    answer = json.loads(raw)
    return answer["choices"][0]["text"], answer["usage"]["completion_tokens"], time.perf_counter() - t0


def round_of(port, n_clients, want=None):
    """(tokens a second of all clients, median seconds of an answer).  want: the texts of the answers, if they are
    known; SystemExit where one is another."""
    with concurrent.futures.ThreadPoolExecutor(n_clients) as pool:
        t0 = time.perf_counter()
        found = list(pool.map(lambda i: answered(port, i), range(n_clients)))
        seconds = time.perf_counter() - t0
    for i, (text, *_) in enumerate(found if want else ()):
        if text != want[i]:
            raise SystemExit(f"client {i} of {n_clients} got {text!r}, alone it is {want[i]!r}")
    return sum(n for _, n, _ in found) / seconds, statistics.median(s for *_, s in found)


def alone(model, n_clients, n_threads):
    """The texts of the answers, each prompt alone."""
    with load_model(model, n_threads=n_threads, n_ctx=N_CTX) as m:
        return [m.generate(prompt(i), N_TOKENS, temp=0, ignore_eos=True).text for i in range(n_clients)]


def measured(servers, model, n_clients, n_threads, rounds, want):
    """{server: (tokens a second of each round, seconds of an answer)}; the first round of each is not counted."""
    found = {name: ([], []) for name in servers}
    with contextlib.ExitStack() as stack:
        ports = {name: stack.enter_context(running(command(model, n_clients, n_threads)))
                 for name, command in servers.items()}
        for k in range(rounds + 1):
            for name, port in ports.items():
                speed, seconds = round_of(port, n_clients, want if name == "ggjit" else None)
                if k:
                    found[name][0].append(speed)
                    found[name][1].append(seconds)
    return found


def table(model, servers, clients, n_threads, rounds):
    lines = ["| clients | server | tokens/s | an answer | ratio |", "|---|---|---|---|---|"]
    want = alone(model, max(clients), n_threads)
    for n in clients:
        found = measured(servers, model, n, n_threads, rounds, want)
        ggjit = statistics.median(found["ggjit"][0])
        for name, (speeds, seconds) in found.items():
            ratio = "-" if name == "ggjit" else number(ggjit / statistics.median(speeds))
            lines.append(f"| {n} | {name} | {Spread(speeds, '')} | {Spread(seconds, 's')} | {ratio} |")
    return "\n".join(lines)


def main(argv=None):
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("model")
    p.add_argument("--llama-server", metavar="BIN")
    p.add_argument("--clients", default="1,8,64", type=lambda s: [int(n) for n in s.split(",")])
    p.add_argument("--threads", type=int, default=1)
    p.add_argument("--rounds", type=int, default=3)
    args = p.parse_args(argv)
    servers = {"ggjit": ours} | ({"llama-server": llama_server(args.llama_server)} if args.llama_server else {})
    print(f"{args.model}, {args.threads} thread(s) of {cpu_model()}; {N_TOKENS} tokens an answer, {args.rounds} rounds "
          f"in turns. {idle_check('At the start')}.\n")
    print(table(args.model, servers, args.clients, args.threads, args.rounds))
    print(f"\n{idle_check('At the end')}.")


if __name__ == "__main__":
    main()
