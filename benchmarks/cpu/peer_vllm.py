"""vLLM's CPU build in bfloat16. MODEL is a folder: the same weights dequantised (see run.py)."""

import os
import sys

os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ["VLLM_CPU_OMP_THREADS_BIND"] = f"0-{int(sys.argv[2]) - 1}"

from figures import Prompts, measure
from vllm import LLM, SamplingParams, TokensPrompt


class Vllm:
    def __init__(self, model: str, _threads: int) -> None:
        self.llm = LLM(model, dtype="bfloat16", max_model_len=2048, max_num_seqs=16, enable_prefix_caching=False, disable_log_stats=True)

    def run(self, prompts: Prompts, output_tokens: int) -> list[list[int]]:
        params = SamplingParams(temperature=0, max_tokens=output_tokens, ignore_eos=True)
        answers = self.llm.generate([TokensPrompt(prompt_token_ids=ids) for ids in prompts], params, use_tqdm=False)
        return [list(answer.outputs[0].token_ids) for answer in answers]


if __name__ == "__main__":
    measure(Vllm)
