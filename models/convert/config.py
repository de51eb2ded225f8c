"""config.json of a Hugging Face folder: keys under their several names, and what follows from them."""
from ggjit.ops.core.errors import ModelError, NotSupported


class Config:
    """config.json: `config["hidden_size"]` or the first of several names.  Errors: ModelError with the path."""

    def __init__(self, path, values):
        whole = {k: values[k] for k in ("architectures",) if k in values}        # of the model, not of its decoder
        self.path, self.values = path, values | (values.get("text_config") or {}) | whole
        self.file_type = 0              # general.file_type; set when the type is known

    def get(self, *names, default=None):
        return next((self.values[n] for n in names if self.values.get(n) is not None), default)

    def __getitem__(self, names):
        value = self.get(*(names if isinstance(names, tuple) else (names,)))
        if value is None:
            raise ModelError(f"{self.path}: {names!r} is missing; fetch the folder again")
        return value

    @property
    def n_layer(self):
        return self["num_hidden_layers", "n_layer", "n_layers", "num_layers"]

    @property
    def n_expert(self):
        return self.get("num_local_experts", "num_experts", "n_routed_experts", default=0)

    @property
    def head_dim(self):
        return self.get("head_dim") or self["hidden_size", "n_embd"] // self["num_attention_heads", "n_head"]

    @property
    def ssm_groups(self):
        return self.get("mamba_n_groups", "n_groups", default=1)

    def rope(self):
        """rope_parameters, or the older keys of the same meaning."""
        rope = dict(self.get("rope_parameters", "rope_scaling", default={}))
        if not {"full_attention", "sliding_attention"} & set(rope):
            mirrored = {"rope_theta": self.get("rope_theta", "global_rope_theta", "rotary_emb_base"),
                        "rope_type": rope.get("type"),
                        "partial_rotary_factor": self.get("partial_rotary_factor", "rotary_pct", "rope_pct"),
                        "original_max_position_embeddings": self.get("original_max_position_embeddings")}
            rope = {k: v for k, v in mirrored.items() if v is not None} | rope
            if (local := self.get("rope_local_base_freq", "local_rope_theta")) is not None:
                rope["sliding_attention"] = {"rope_theta": local}
        return rope

    def n_rotated(self, default=1.0):
        """Numbers of a head that RoPE turns.  default: their part, where the file does not say."""
        rope = self.rope()
        return int(rope.get("full_attention", rope).get("partial_rotary_factor", default) * self.head_dim)

    def near(self, every):
        """[does layer i look at a window?], as layer_types says; else all but one of so many."""
        kinds = self.get("layer_types", default=["sliding_attention" if (i + 1) % every else "full_attention"
                                                 for i in range(self.n_layer)])
        return [kind == "sliding_attention" for kind in kinds]

    def full(self, key, every=6):
        """The value of a key in layers without a window, which may have their own: one for all, or layer by layer."""
        of_layers = {int(i): about for i, about in self.get("per_layer_config", default={}).items()}
        full = [i for i, near in enumerate(self.near(every)) if not near]
        own = {of_layers[i][key] for i in full if key in of_layers.get(i, ())}
        if len(own) > 1:
            self.refuse(f"{key} differs between layers without a window")
        name = "global_head_dim" if key == "head_dim" else key.replace("num_", "num_global_")
        return self.get(name, default=next(iter(own), self[key]))

    def refuse(self, what):
        raise NotSupported(f"{self.path}: {what}, which GGUF cannot express for this architecture; take another model")
