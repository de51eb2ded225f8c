"""What ggml's list of test cases holds, and what ggjit adds to it."""
N_CASES, N_CLASSES = 21093, 104             # what ggml's eval list holds
OWN_OPS = {"FLASH_ATTN_PAGED"}              # ops that ggml does not have
