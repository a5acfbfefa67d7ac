"""Chat: one conversation, and several at once"""

from vllm import LLM, SamplingParams

conversation = [
    {"role": "system", "content": "You answer in one word."},
    {"role": "user", "content": "Hello"},
    {"role": "assistant", "content": "Hi"},
    {"role": "user", "content": "Which colour has grass?"},
]


def main():
    llm = LLM("tiny/llama", max_model_len=512)
    params = SamplingParams(temperature=0, max_tokens=6)
    one = llm.chat(conversation, params)
    several = llm.chat([conversation, conversation[:2]], sampling_params=params, use_tqdm=False)
    assert one[0].outputs[0].token_ids == several[0].outputs[0].token_ids
    assert one[0].prompt.endswith("user: Which colour has grass?\nassistant: ")
    assert several[1].prompt.endswith("user: Hello\nassistant: ")


if __name__ == "__main__":
    main()
