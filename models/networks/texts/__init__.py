"""Networks that read and write texts.

    decoder             texts are read and continued
    batches             the shapes of a decoder's graphs, and what their inputs hold
    results             what a decoder makes of a text: hidden states, logits, keys and values, vectors, scores
    writing             texts that a decoder writes and scores
    drafter             a small network that guesses for a decoder
    encoder             a text is read at once
    diffuser            all tokens of a text are written at once, in steps
    t5                  an encoder reads a text, a decoder writes another
"""
