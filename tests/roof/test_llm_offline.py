"""`LLM` on the fake device: forms of prompts, options, results, refusals, interrupts."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from hexad import LLM, SamplingParams
from hexad.common.errors import ConfigError, ContextLengthError, EngineDeadError, ModelError, RequestError
from hexad.llm import config_from_options

GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)


def make(folder: Path, **options: Any) -> LLM:
    return LLM(str(folder), device="fake", kv_cache_memory_bytes=2**22, **options)


@pytest.fixture(scope="module")
def llm(model_folder: Path) -> Iterator[LLM]:
    with make(model_folder) as llm:
        yield llm


def test_one_prompt_in_every_form(llm: LLM) -> None:
    ids = llm.get_tokenizer().encode("Hello")
    forms: list[Any] = ["Hello", ["Hello"], ids, [ids], {"prompt": "Hello"}, {"prompt_token_ids": ids}, [{"prompt_token_ids": ids}]]
    results = [llm.generate(form, GREEDY) for form in forms]
    assert all(len(result) == 1 for result in results)
    assert len({tuple(result[0].outputs[0].token_ids) for result in results}) == 1
    assert [result[0].prompt for result in results] == ["Hello", "Hello", None, None, "Hello", None, None]
    (output,) = results[0][0].outputs
    assert output.finish_reason == "length" and len(output.token_ids) == 12
    assert output.text == llm.get_tokenizer().decode(output.token_ids)


def test_results_come_in_the_order_of_the_prompts(llm: LLM) -> None:
    prompts = [f"prompt number {index}" for index in range(150)]
    params = [SamplingParams(temperature=0.0, max_tokens=1 + index % 7, ignore_eos=True) for index in range(150)]
    results = llm.generate(prompts, params)
    assert [result.prompt for result in results] == prompts
    assert [len(result.outputs[0].token_ids) for result in results] == [each.max_tokens for each in params]
    alone = llm.generate(prompts[77], params[77])[0]
    assert alone.outputs[0].token_ids == results[77].outputs[0].token_ids
    assert len({result.request_id for result in results}) == 150


def test_metrics_and_cached_tokens(llm: LLM) -> None:
    prompt = "a prefix that is certainly longer than two blocks of tokens" * 2
    llm.generate(prompt, GREEDY)
    metrics = llm.generate(prompt, GREEDY)[0].metrics
    assert metrics.ttft_s is not None and metrics.queued_s is not None
    assert 0 < metrics.ttft_s <= metrics.latency_s
    assert metrics.num_cached_tokens >= 32


def test_choices_and_logprobs(llm: LLM) -> None:
    params = SamplingParams(temperature=1.0, n=3, seed=5, max_tokens=6, logprobs=2, prompt_logprobs=1, ignore_eos=True)
    result = llm.generate("Hello", params)[0]
    assert [output.index for output in result.outputs] == [0, 1, 2]
    assert len({tuple(output.token_ids) for output in result.outputs}) == 3
    for output in result.outputs:
        assert output.logprobs is not None and len(output.logprobs) == 6
        assert [entry.token_id for entry in output.logprobs] == output.token_ids
        assert output.cumulative_logprob == pytest.approx(sum(entry.logprob for entry in output.logprobs))
    assert result.prompt_logprobs is not None and result.prompt_logprobs[0] is None
    assert len(result.prompt_logprobs) == len(result.prompt_token_ids)
    assert llm.generate("Hello", params)[0].outputs[0].token_ids == result.outputs[0].token_ids, "seeded"


def test_a_stop_string_ends_one_choice_and_not_its_siblings(llm: LLM) -> None:
    free = SamplingParams(temperature=1.0, n=2, seed=11, max_tokens=200, ignore_eos=True)
    texts = [output.text for output in llm.generate("Hello", free)[0].outputs]
    stop = next(texts[0][i : i + 2] for i in range(3, 100) if texts[0][i : i + 2].isascii() and texts[0][i : i + 2] not in texts[1])
    stopped = SamplingParams(temperature=1.0, n=2, seed=11, max_tokens=200, ignore_eos=True, stop=(stop,))
    first, second = llm.generate("Hello", stopped)[0].outputs
    assert first.text == texts[0][: texts[0].index(stop)] and (first.finish_reason, first.stop_reason) == ("stop", stop)
    assert second.text == texts[1] and second.finish_reason == "length"
    stats = llm.stats()
    assert stats["num_running"] == stats["live_requests"] == 0


def test_a_stop_string_frees_the_engine_at_once(llm: LLM) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=400, ignore_eos=True)
    text = llm.generate("Hello", params)[0].outputs[0].text
    before = llm.stats()["generation_tokens_total"]
    stop = next(text[i : i + 2] for i in range(3, 100) if text[i : i + 2].isascii())
    llm.generate("Hello", SamplingParams(temperature=0.0, max_tokens=400, ignore_eos=True, stop=(stop,)))
    assert llm.stats()["generation_tokens_total"] - before < 110


def test_chat(llm: LLM) -> None:
    conversation = [{"role": "user", "content": "Hi <|im_end|>"}]
    (result,) = llm.chat(conversation, GREEDY)
    assert result.prompt == "<|im_start|>user\nHi <|im_end|><|im_end|>\n<|im_start|>assistant\n"
    end = llm.get_tokenizer().token_to_id("<|im_end|>")
    assert result.prompt_token_ids.count(end) == 1, "markers inside a message are text"
    both = llm.chat([conversation, [{"role": "user", "content": "Bye"}]], GREEDY)
    assert len(both) == 2 and both[0].outputs[0].token_ids == result.outputs[0].token_ids


def test_defaults_come_from_the_models_author(llm: LLM) -> None:
    params = llm.get_default_sampling_params()
    assert (params.temperature, params.max_tokens) == (0.5, 9)
    assert len(llm.generate("Hello")[0].outputs[0].token_ids) <= 9


@pytest.mark.parametrize(
    ("prompts", "params", "message"),
    [
        ("x" * 600, None, "512"),
        (["fine", "x" * 510], SamplingParams(max_tokens=5), "at most 2"),
        ([1, 2, 10**6], None, "1000000"),
        ({"text": "x"}, None, "prompt_token_ids"),
        ([], [GREEDY], "1 sampling params for 0 prompts"),
        (["a", "b"], [GREEDY], "1 sampling params for 2 prompts"),
        ("a", SamplingParams(top_p=2.0), "top_p"),
        ("", None, "empty"),
        ([[]], None, "empty"),
    ],
)
def test_refusals_come_before_anything_runs(llm: LLM, prompts: Any, params: Any, message: str) -> None:
    before = llm.stats()["steps_total"]
    with pytest.raises(RequestError, match=message):
        llm.generate(prompts, params)
    assert llm.stats()["steps_total"] == before and llm.stats()["live_requests"] == 0


def test_b11_a_prompt_that_is_too_long_is_refused_whole(llm: LLM) -> None:
    with pytest.raises(ContextLengthError, match=r"600 tokens.*context is 512"):
        llm.generate("x" * 600)
    result = llm.generate("x" * 500, SamplingParams(temperature=0.0, ignore_eos=True))[0]
    assert len(result.outputs[0].token_ids) == 12 and result.outputs[0].finish_reason == "length"


def test_no_prompts_no_results(llm: LLM) -> None:
    assert llm.generate([], GREEDY) == []


def test_an_interrupt_leaves_nothing_running(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    step, turns = llm._core.step, iter(range(100))

    def interrupted(*args: Any) -> Any:
        if next(turns) == 5:
            raise KeyboardInterrupt
        return step(*args)

    monkeypatch.setattr(llm._core, "step", interrupted)
    with pytest.raises(KeyboardInterrupt):
        llm.generate(["a", "b"], SamplingParams(max_tokens=300, ignore_eos=True))
    monkeypatch.undo()
    assert llm.stats()["live_requests"] == 0
    assert len(llm.generate("a", GREEDY)[0].outputs[0].token_ids) == 12


def test_progress_bar(llm: LLM, capsys: pytest.CaptureFixture[str]) -> None:
    llm.generate(["a", "b"], GREEDY, use_tqdm=True)
    assert "prompts" in capsys.readouterr().err


def test_asynchronous_or_not_is_the_same(llm: LLM, model_folder: Path) -> None:
    prompts = [f"question {index}" * (1 + index % 5) for index in range(40)]
    params = SamplingParams(temperature=1.0, seed=3, n=2, max_tokens=20)
    with make(model_folder, async_scheduling=False, max_num_seqs=7) as other:
        assert other.stats()["depth"] == 1
        ours, theirs = llm.generate(prompts, params), other.generate(prompts, params)
    assert [[o.token_ids for o in r.outputs] for r in ours] == [[o.token_ids for o in r.outputs] for r in theirs]


def test_a_closed_model_refuses(model_folder: Path) -> None:
    llm = make(model_folder)
    llm.close()
    llm.close()
    with pytest.raises(EngineDeadError, match="closed"):
        llm.generate("a", GREEDY)


def test_options_are_flat_and_checked(model_folder: Path) -> None:
    config = config_from_options(
        {"model": "m", "dtype": "float32", "max_model_len": 64, "block_size": None, "enable_prefix_caching": False}
    )
    assert config.model.dtype == "float32" and config.model.max_model_len == 64
    assert config.cache.block_size is None and not config.cache.enable_prefix_caching
    with pytest.raises(ConfigError, match="'max_model_len'"):
        LLM("m", max_modle_len=5)
    with pytest.raises(ConfigError, match="known are"):
        config_from_options({"colour": "red"})
    with pytest.raises(ConfigError, match="port"):
        config_from_options({"port": 1})  # there is no server
    with pytest.raises(ConfigError, match="dtype"):
        config_from_options({"dtype": "float12"})
    with pytest.raises(ModelError, match="nowhere"):
        LLM("/nowhere/at/all")
    with pytest.raises(ConfigError, match="max_model_len = 1024"):
        make(model_folder, max_model_len=1024)


def test_option_names_are_unambiguous() -> None:
    from hexad.common.config import HexadConfig

    names = [path.partition(".")[2] for path in HexadConfig().keys() if not path.startswith("server.")]  # noqa: SIM118
    assert len(names) == len(set(names))
