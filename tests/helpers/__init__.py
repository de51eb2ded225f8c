"""What several tests need: `paths` and `requirements` (reference data, packages), `processes`, `timing`; `devices` that
look like accelerators; `tiny_model`, `sched_graphs` make models and graphs; `*oracle` ask the real ggml and llama.cpp.
No test module imports another one: what two of them need is here."""
