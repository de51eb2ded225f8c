"""`ggjit serve`: one model over HTTP, with OpenAI's and llama.cpp's interfaces.

    service.py      the model and the thread that computes; requests wait for what it gives
    forms.py        requests as options of `generate`, answers as OpenAI's JSON
    app.py          routes, streams, errors as status and remedy, keys, limits
"""
