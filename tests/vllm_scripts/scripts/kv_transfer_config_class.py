"""Configuration classes of vllm.config"""

from vllm.config import KVTransferConfig

KVTransferConfig(kv_connector="ExampleConnector", kv_role="kv_both")
