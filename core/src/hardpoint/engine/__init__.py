"""The engine: requests in, outputs out. What belongs to one device is behind the executor, what belongs to HTTP is in the server.

The loop (`core`) joins a scheduler and an executor into steps over tokens; `commands` go into it and come out of it as events. `loops`
says who drives it: its client, a thread, or a process (`process_loop` and `process_messages` on the client's side, `process_main` on the
other); `data_parallel` is one loop over several engines. Its parts are `beam_search`, `adapters`, `embedding_sources`, `speculation`,
`kv_size` and `sleep/`, the life cycle.

Clients know text: `LLM` (`llm`) for scripts, over `LLMEngine` (`llm_engine`), which is stepped, and `AsyncLLM` (`async_llm`). `startup`
starts an engine for them. `inputs`, `media` and `prompt_embeds` take prompts, `request_maker` makes requests of them, `request`,
`detokenizer`, `outputs` and `pooling` make outputs of what the loop brings. `config` has the settings, `info` and `metrics` the counters.
"""
