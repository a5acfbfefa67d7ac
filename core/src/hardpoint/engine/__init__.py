"""The engine: requests in, outputs out.

`EngineCore` joins a scheduler and an executor into steps over tokens; `LLMEngine` adds text, stop strings and outputs; `LLM` is the
offline interface. What belongs to one device is behind the executor, what belongs to HTTP is in the server.
"""
