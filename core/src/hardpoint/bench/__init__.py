"""Load on a server of OpenAI's interface, ours or another: what is asked and when, the client that asks, and what its times say.

It knows servers by HTTP alone and nothing of engines; `hardpoint bench serve` is its command.
"""
