"""llama.cpp's RPC servers on this machine, from a build with GGML_RPC (GGML_LIB_DIR names its folder).

    GGML_LIB_DIR=build/bin python -m benchmarks.llama_rpc model.gguf --servers 2        prints milliseconds a token

A server is a process that lends its CPU with `ggml_backend_rpc_start_server`.  The client is a process, too: it aborts
when a server is lost.  Layers are divided as llama.cpp does it, by free memory: evenly.
"""
import argparse
import ctypes as C
import os
import pathlib
import socket
import struct
import subprocess
import sys
import time

from benchmarks.engines.llama import _P, LOG, context_params
from benchmarks.engines.peer import llama_library
from benchmarks.worker import EngineError, Missing

N_GPU_LAYERS_OFFS = 16          # in llama_model_params, after the list of devices and that of overrides
MODULE = [sys.executable, "-m", "benchmarks.llama_rpc"]


def folder():
    """The build with the RPC backend.  Errors: Missing."""
    for found in filter(None, os.environ.get("GGML_LIB_DIR", "").split(os.pathsep)):
        if list(pathlib.Path(found).glob("libggml-rpc.*")):
            return found
    raise Missing("GGML_LIB_DIR names no folder with libggml-rpc: build llama.cpp with -DGGML_RPC=ON "
                  "-DBUILD_SHARED_LIBS=ON")


def _library(name):
    path = sorted(pathlib.Path(folder()).glob(f"lib{name}.*"))[0]
    return C.CDLL(str(path), mode=os.RTLD_LOCAL | os.RTLD_NOW)


def _device(registry):
    """The first device of a registry, as C knows it."""
    get = _library("ggml-base").ggml_backend_reg_dev_get
    get.restype, get.argtypes = _P, (_P, C.c_size_t)
    return get(registry, 0)


def serve(port):
    """Lend the CPU, one thread; does not return."""
    cpu = _library("ggml-cpu").ggml_backend_cpu_reg
    cpu.restype = _P
    start = _library("ggml-rpc").ggml_backend_rpc_start_server
    start.restype, start.argtypes = None, (C.c_char_p, C.c_char_p, C.c_size_t, C.c_size_t, C.POINTER(_P))
    start(f"127.0.0.1:{port}".encode(), None, 1, 1, (_P * 1)(_device(cpu())))


def milliseconds(path, ports, n_tokens):
    """The shortest time of a token, all layers on the servers."""
    lib, log = llama_library(folder()), []
    said = LOG(lambda level, text, data: log.append(text))
    lib.llama_log_set(said, None)
    lib.llama_backend_init()
    add = _library("ggml-rpc").ggml_backend_rpc_add_server
    add.restype, add.argtypes = _P, (C.c_char_p,)
    devices = (_P * (len(ports) + 1))(*(_device(add(f"127.0.0.1:{port}".encode())) for port in ports), None)
    params = lib.llama_model_default_params()
    C.memmove(C.byref(params), C.byref(C.c_void_p(C.addressof(devices))), 8)
    C.memmove(C.byref(params, N_GPU_LAYERS_OFFS), struct.pack("<i", 999), 4)
    model = lib.llama_model_load_from_file(os.fsencode(path), params)
    context = model and lib.llama_init_from_model(model, context_params(lib, 512, 1))
    if not context:
        raise EngineError(f"llama.cpp does not load {path}: {b''.join(log[-6:]).decode('utf-8', 'replace').strip()}")
    token, times = (C.c_int32 * 1)(1), []
    for _ in range(n_tokens):
        t0 = time.perf_counter()
        if lib.llama_decode(context, lib.llama_batch_get_one(token, 1)):
            raise EngineError("llama_decode failed")
        lib.llama_synchronize(context)
        lib.llama_get_logits_ith(context, -1)[0]
        times.append(1e3 * (time.perf_counter() - t0))
    return min(times)


def _free_port():
    with socket.create_server(("127.0.0.1", 0)) as s:
        return s.getsockname()[1]


def measured(path, n_servers, n_tokens):
    """Milliseconds a token with so many servers, which are started and ended here.  Errors: Missing, EngineError."""
    folder()
    ports = [_free_port() for _ in range(n_servers)]
    servers = [subprocess.Popen([*MODULE, "--serve", str(port)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
               for port in ports]
    try:
        for port in ports:
            _listens(port)
        command = [*MODULE, str(path), "--tokens", str(n_tokens), "--ports", *map(str, ports)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    finally:
        for process in servers:
            process.kill()
            process.wait()
    if done.returncode:
        raise EngineError(f"llama.cpp over RPC ended with {done.returncode}: {done.stderr.strip()[-500:]}")
    return float(done.stdout.split()[-1])


def _listens(port):
    deadline = time.monotonic() + 60
    while True:
        try:
            socket.create_connection(("127.0.0.1", port), 1).close()
            return
        except OSError:
            if time.monotonic() > deadline:
                raise EngineError("an RPC server does not start") from None
            time.sleep(0.05)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?")
    parser.add_argument("--servers", type=int, default=1)
    parser.add_argument("--tokens", type=int, default=50)
    parser.add_argument("--ports", type=int, nargs="+", help="of servers that run already")
    parser.add_argument("--serve", type=int, metavar="PORT", help="be a server")
    args = parser.parse_args()
    if args.serve:
        serve(args.serve)
    elif args.ports:
        print(milliseconds(args.model, args.ports, args.tokens))
    else:
        print(measured(args.model, args.servers, args.tokens))


if __name__ == "__main__":
    main()
