"""Arguments of absent features, with values that ask for nothing"""

from vllm import LLM, SamplingParams

llm = LLM(
    "tiny/llama",
    max_model_len=64,
    tokenizer_mode="auto",
    trust_remote_code=False,
    tensor_parallel_size=1,
    data_parallel_size=1,
    quantization=None,
    enable_lora=False,
    speculative_config=None,
    cpu_offload_gb=0,
    disable_custom_all_reduce=True,
    compilation_config={},
    max_seq_len_to_capture=8192,
    hf_overrides={},
    model_impl="auto",
    runner="auto",
    convert="auto",
    logits_processors=None,
)
params = SamplingParams(max_tokens=2, best_of=None, bad_words=None, thinking_token_budget=None, flat_logprobs=False)
assert len(llm.generate("Hello", params)) == 1
