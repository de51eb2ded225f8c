"""Networks that read texts, and the pictures among them.

    decoder             texts are read and continued
    batches             the shape and the inputs of a decoder's graph for some tokens
    results             what a decoder makes of a text: hidden states, logits, keys and values, vectors, scores
    writing             texts that a decoder writes and scores
    encoder             a text is read at once
    diffuser            all tokens of a text are written at once, in steps
    t5                  an encoder reads a text, a decoder writes another
    vision              pictures as vectors that a decoder reads
    projectors          what families of vision networks have of their own
    picture_attention   where the patches of a picture look
    vision_input        sizes, tiles and numbers of a picture, as a vision network gets them
"""
