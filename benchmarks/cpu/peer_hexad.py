"""Hexad in this process."""

from figures import Prompts, measure

from hexad import LLM, SamplingParams


class Hexad:
    def __init__(self, model: str, threads: int) -> None:
        self.llm = LLM(model, threads=threads, max_model_len=2048, max_num_seqs=16, kv_cache_memory_bytes=480 * 2**20)

    def run(self, prompts: Prompts, output_tokens: int) -> list[list[int]]:
        params = SamplingParams(temperature=0, max_tokens=output_tokens, ignore_eos=True)
        answers = self.llm.generate([{"prompt_token_ids": ids} for ids in prompts], params)
        return [list(answer.outputs[0].token_ids) for answer in answers]


measure(Hexad)
