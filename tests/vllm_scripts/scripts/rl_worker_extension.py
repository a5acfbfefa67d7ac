"""A worker extension of one's own, called by collective_rpc"""

from vllm import LLM


class WorkerExtension:
    def update_weight(self, name):
        return name


llm = LLM("tiny/llama", worker_extension_cls="__main__.WorkerExtension", enforce_eager=True)
llm.collective_rpc("update_weight", args=("lm_head.weight",))
