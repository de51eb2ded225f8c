"""Networks on the engine.

    load.py             load_model: a GGUF file -> the network of its architecture; load_options.py: what is asked for
    network.py          what the architectures share: weights, plans by shape, ids
    decoder.py          texts that are read and continued; decoder_graph.py: weights, caches and parts of its graphs
    kv_cells.py         rows of the caches; context_shift.py: tokens that are dropped; saved_state.py: a text as bytes
    vision.py           pictures as vectors; projectors.py: families; vision_input.py: what it gets of them;
                        picture_tokens.py: as tokens of a text; picture_attention.py: where patches look
    predictor.py        guesses by a layer of the network's own
    steering.py         adapters and control vectors that are changed after loading
    diffuser.py         networks that write all tokens at once
    encoder.py          encoders; t5.py: an encoder and a decoder; pooling.py: one row of the tokens of a text
    inside.py           named values of all networks: read, replaced, drawn; hooks.py: how; pictures.py: what is drawn;
                        attribution.py: gradients by what is read
    tensor_split.py     weights and caches cut between devices
    offload.py          layers on a GPU; device_map.py: over several devices; layout.py: which weights are repacked
    diff.py             where two models part: errors of named tensors
    bulk.py             many texts, in parts, on the workers of a cluster
    speech_network.py   speech networks: sound is heard, text is written; whisper.py, moonshine.py: two of them
    silero.py           Silero VAD; speech.py: from its probabilities to stretches of speech
    model_table.py      a model at the end of a cell; other_methods.py: methods that other libraries' models have
    strict.py           files with more in them than is used are refused
    evaluate.py         perplexity, KL divergence, importance matrices
    multiple_choice.py  which of several endings is likeliest: HellaSwag
    finetune.py         LoRA adapters trained; training.py: the loss as a graph
    peak.py             the peak memory of a model, measured without loading it; memory.py: what it takes, by term
    fit.py              the best setting within so much memory; arena.py: graphs within so many bytes
"""
