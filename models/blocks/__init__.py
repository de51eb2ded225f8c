"""The pieces networks are made of.  A piece is a frozen dataclass: it reads its tensors, says what it keeps between
tokens, and adds its part to a graph.

    hparams.py          hyperparameters from a file's metadata, checked: sizes, RoPE, windows
    description.py      Description and Block: which pieces a network has, in which order; what pieces are given
    attention.py        attention with norms, biases, windows, sinks, soft caps, RoPE or ALiBi
    feed_forward.py     dense feed-forward networks; moe.py: routers and experts
    latent.py           attention over low-rank keys and values (MLA); indexer.py: which keys a token looks at
    cross.py            attention over what an encoder made of another text
    grove.py            experts with small ones beside them
    residual_attention.py   attention over what earlier layers left
    state_space.py      Mamba 1 and 2; short_conv.py: gated short convolutions
    delta.py            the gated delta rule; rwkv.py: RWKV 6 and 7; lightning.py: linear attention with fixed decays
    block_indexer.py    attention over blocks of positions; pool_indexer.py: over runs of tokens
    compressed.py       attention over windows, and over one key for each run of tokens before them
    hyper_connections.py    several residual streams in place of one; cycles.py: two stacks, passed several times
    switched.py         adapters that tokens of the text switch on
    next_token.py       a layer that guesses the token after the next; drafts.py: networks that guess for a larger one
    gemma.py            embeddings for every layer, streams, experts beside a dense network
"""
