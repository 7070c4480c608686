"""OpenVINO GenAI with paged attention, reading the GGUF file itself."""

import numpy as np
import openvino
import openvino_genai
from figures import Prompts, measure


class OpenVino:
    def __init__(self, model: str, threads: int) -> None:
        scheduler = openvino_genai.SchedulerConfig()
        scheduler.cache_size, scheduler.max_num_seqs, scheduler.enable_prefix_caching = 1, 16, False
        self.pipeline = openvino_genai.ContinuousBatchingPipeline(model, scheduler, "CPU", {"INFERENCE_NUM_THREADS": threads})

    def run(self, prompts: Prompts, output_tokens: int) -> list[list[int]]:
        config = openvino_genai.GenerationConfig()
        config.max_new_tokens, config.ignore_eos, config.do_sample = output_tokens, True, False
        answers = self.pipeline.generate([openvino.Tensor(np.array([ids], np.int64)) for ids in prompts], [config] * len(prompts))
        return [answer.m_generation_ids[0] for answer in answers]


measure(OpenVino)
