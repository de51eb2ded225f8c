"""llama.cpp's renderer of chat templates, asked through its server; a process of its own.

    python llamacpp_chat.py MODEL < jobs.json > answers.json        jobs: [[template, request of /apply-template], ...]
"""
import json
import os
import sys
import urllib.request

import xllamacpp


def prompt(model, template, request):
    params = xllamacpp.CommonParams()
    params.model.path, params.chat_template = model, template
    params.use_jinja, params.warmup, params.n_ctx, params.port, params.n_gpu_layers = True, False, 64, 0, 0
    server = xllamacpp.Server(params)
    asked = urllib.request.Request(server.listening_address + "/apply-template", json.dumps(request).encode(),
                                   {"Content-Type": "application/json"})
    with urllib.request.urlopen(asked, timeout=60) as answer:
        return json.load(answer)["prompt"]


if __name__ == "__main__":
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)                           # what the server prints is no answer
    json.dump([prompt(sys.argv[1], *job) for job in json.load(sys.stdin)], out)
    out.close()
