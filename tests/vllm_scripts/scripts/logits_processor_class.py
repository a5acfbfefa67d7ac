"""Logits processors of whole batches, as classes"""

from vllm.v1.sample.logits_processor import BatchUpdate, LogitsProcessor

print(BatchUpdate, LogitsProcessor)
