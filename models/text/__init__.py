"""Text <-> token ids, and the choice of the next token.

    tokenizer.py        the vocabularies of GGUF files; vocabulary.py: what the kinds share, which are bpe.py,
                        sentencepiece.py, unigram.py, wordpiece.py and prefixes.py
    special_tokens.py   which tokens end a text or are cut out whole; pre_tokenizers.py: how text is split into words
    generation.py       a text piece by piece; answer.py: what is shown, and the end
    speculation.py      guesses of what follows, and whether they pay
    diffusion.py        texts whose tokens are decided in any order; infill.py: the prompt of a text with a hole
    running_batch.py    sequences that are computed together; generations.py: a list of prompts
    sampling.py         the choice of each token; samplers.py: the single steps
    logprobs.py         log-probabilities of tokens, and how they look in a notebook;
                        text_inside.py: with the model's insides
    grammar.py          what a grammar allows next; gbnf.py: its notation, token_trie.py: the vocabulary as a tree
    json_schema.py      JSON Schemas as grammars; json_pattern.py: their regular expressions
    picture_prompt.py   where pictures stand in a prompt
    chat_template.py    conversations as text; template_worker.py: the process that renders them
"""
