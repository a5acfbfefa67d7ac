"""Stream an answer token by token through `LLMEngine`: `python examples/streaming.py`."""

from __future__ import annotations

from hardpoint import EngineConfig, LLMEngine, SamplingParams
from hardpoint.sampling import RequestOutputKind


def main() -> None:
    engine = LLMEngine(EngineConfig(model="demo"))
    prompt = engine.process_chat([{"role": "user", "content": "Give three facts about the moon."}])
    params = SamplingParams(temperature=0, max_tokens=96, output_kind=RequestOutputKind.DELTA)
    engine.add_request("moon", prompt, params)
    while engine.has_unfinished_requests():
        for output in engine.step():
            print(output.outputs[0].text, end="", flush=True)
    print()
    engine.shutdown()


if __name__ == "__main__":
    main()
