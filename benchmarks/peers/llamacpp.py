"""llama.cpp's server as a process of its own interpreter: writes the model as GGUF with weights of
eight or four bits a number, loads it, and samples for each line that it reads.

Run as a script by `peer.py`, with `pip install xllamacpp gguf safetensors`; nothing of isobit is
imported. Llama.cpp takes the prompts as token ids, all in one request, and batches them. Its words
are made up: the model has none that matter.
"""

import json
import sys
import tempfile
from pathlib import Path

_NAMES = {
    "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm",
    "mlp.down_proj": "ffn_down", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up",
    "self_attn.k_norm": "attn_k_norm", "self_attn.q_norm": "attn_q_norm",
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
}  # fmt: skip


def named(name: str) -> str:
    """GGUF's name of a tensor of a Hugging Face Qwen3."""
    if not name.startswith("model.layers."):
        return {
            "model.embed_tokens.weight": "token_embd.weight",
            "model.norm.weight": "output_norm.weight",
        }[name]
    _, _, layer, rest = name.split(".", 3)
    return f"blk.{layer}.{_NAMES[rest.removesuffix('.weight')]}.weight"


def write(folder: Path, target: Path, form: str) -> None:
    """The Qwen3 in `folder` as a GGUF whose matrices are of `form`, as `llama-quantize` has them."""
    import gguf
    from safetensors import safe_open

    config = json.loads((folder / "config.json").read_text())
    writer = gguf.GGUFWriter(str(target), "qwen3")
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("default")
    writer.add_token_list([f"w{number}" for number in range(config["vocab_size"])])
    writer.add_token_types([gguf.TokenType.NORMAL] * config["vocab_size"])
    writer.add_token_merges(["w 0"])
    writer.add_eos_token_id(config["eos_token_id"])
    kind = gguf.GGMLQuantizationType[form]
    with safe_open(str(folder / "model.safetensors"), "numpy") as tensors:
        for name in list(tensors.keys()):
            data = tensors.get_tensor(name)
            if data.ndim == 1:
                writer.add_tensor(named(name), data)
            else:
                writer.add_tensor(named(name), gguf.quants.quantize(data, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def main() -> None:
    import xllamacpp

    given = json.loads(sys.stdin.readline())
    prompts, new = given["prompts"], given["new"]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.gguf"
        write(Path(given["model"]), path, given["form"])
        settings = xllamacpp.CommonParams()
        settings.model.path = str(path)
        settings.n_parallel = len(prompts)
        settings.n_ctx = len(prompts) * 2 * (len(prompts[0]) + new)
        settings.cpuparams.n_threads = settings.cpuparams_batch.n_threads = given["threads"]
        settings.verbosity = 0
        server = xllamacpp.Server(settings)
        request = {
            "prompt": prompts, "n_predict": new, "temperature": 1.0, "samplers": ["temperature"],
            "ignore_eos": True, "cache_prompt": False, "seed": 0,
        }  # fmt: skip
        print("isobit: ready", flush=True)
        for _ in sys.stdin:
            choices = server.handle_completions(request)["choices"]
            print(f"isobit: {sum(each['text'].count('w') for each in choices)}", flush=True)


if __name__ == "__main__":
    main()
