"""The families of cases: the same parameter grids as ggml's list, one file per group of ops; each ends with
FAMILIES."""
