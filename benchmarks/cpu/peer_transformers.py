"""transformers in bfloat16, its own reading of the GGUF file, static batches."""

from pathlib import Path

import torch
from figures import Prompts, measure
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint


class Transformers:
    def __init__(self, model: str, threads: int) -> None:
        torch.set_num_threads(threads)
        path = Path(model)
        config = AutoConfig.from_pretrained(str(path.parent), gguf_file=path.name)
        network = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
        network.load_state_dict(load_gguf_checkpoint(str(path), return_tensors=True, model_to_load=network)["tensors"], strict=False)
        network.tie_weights()
        self.network = network.to(torch.bfloat16)

    def run(self, prompts: Prompts, output_tokens: int) -> list[list[int]]:
        ids = torch.tensor(prompts)
        with torch.no_grad():
            out = self.network.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=output_tokens,
                min_new_tokens=output_tokens,
                do_sample=False,
                pad_token_id=0,
            )
        return out[:, ids.shape[1] :].tolist()


measure(Transformers)
