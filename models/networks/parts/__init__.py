"""What networks that read texts are made of: caches, graphs, the loss, pooling, pictures among tokens.

    kv_cells            which rows of the caches hold which token of which text
    context_shift       tokens in the middle of a text are dropped
    saved_state         a text and what the layers know of it, as bytes
    decoder_graph       weights, caches and parts of a decoder's graphs
    pooling             one row of the tokens of a text: its embedding, or a classifier's scores
    picture_tokens      pictures among the tokens of a text
    guesses             what networks that guess tokens have in common; predictor: a layer of the network's own;
                        drafting: a draft model that reads its target's layers
    steering            adapters and control vectors that are changed after loading
    training            the loss as a graph
"""
