"""`ggjit serve`: one model over HTTP, with OpenAI's and llama.cpp's interfaces.

    service.py      the model and the thread that computes; requests wait for what it gives
    forms.py        requests as options of `generate`; parts of answers
    answers.py      answers, whole or in pieces, as OpenAI's JSON
    responses.py    the same for /v1/responses
    app.py          routes, streams, errors as status and remedy, keys, limits
    page.py         the page at /, from page.html
    warming.py      what is computed before the first request
"""
