"""What all networks share.

    network             Network: a file, its weights, its tokenizer, plans by input shape
    token_ids           token ids of texts, and the checks of ids
    vectors             texts as vectors and scores: `embed`, `rerank`
    load_options        LoadOptions: the arguments of load_model
    arena               ComputeArena: graphs whose results take at most so many bytes
    memory              the memory of a network, term by term
    strict              files with weights or settings that the network does not use are refused
    model_table         a model at the end of a notebook cell
    only_some           what only some networks do: in all others a call says so
    other_methods       methods that other libraries' models have, named in AttributeErrors
"""
