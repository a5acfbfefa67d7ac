"""A model's tokenizer without its engine"""

from vllm.transformers_utils.tokenizer import get_tokenizer

tokenizer = get_tokenizer("tiny/llama")
assert tokenizer.decode(tokenizer.encode("Hello")) == "Hello"
