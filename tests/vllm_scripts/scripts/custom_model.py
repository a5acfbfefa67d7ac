"""Models registered from outside"""

from vllm.model_executor.models import ModelRegistry

ModelRegistry.register_model("MyModel", "package:MyModel")
