"""Networks: from a model file to its results.

    parts/              caches, graphs and pooling of networks that read texts
    placement/          which device a weight lies on, and in which layout
    inside/             named values of a running network
    base/               what all networks share
    pictures/           pictures as vectors that a decoder reads
    texts/              decoders, encoders, T5, diffusion
    sounds/             Whisper, Moonshine, Silero VAD

    load                load_model: a GGUF file -> the network of its architecture
    bulk                many texts, in parts, on the workers of a cluster
    evaluate            perplexity, KL divergence, importance matrices
    multiple_choice     which of several endings is likeliest: HellaSwag
    diff                where two models part: errors of named tensors
    finetune            LoRA adapters trained
    peak                the peak memory of a model, measured without loading it
    fit                 the best setting within so much memory
    pareto              one text within arenas of several sizes: bytes against time
"""
